"""Kernels built by one run of the tests serve the next: they are kept in pytest's own cache directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import jitact
from jitact import registry

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# pytest imports __init__.py of the checkout as a module named like its folder. It must not become a second jitact.
sys.modules.setdefault(Path(__file__).parents[1].name, jitact)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("JITACT_CACHE_DIR", str(config.cache.mkdir("kernels")))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every device here, one after the other."""
    return request.param


@pytest.fixture
def only_here():
    """Takes what a test defines out of the registry again."""
    before = set(jitact.names())
    yield
    for name in set(jitact.names()) - before:
        registry.unregister(name)
