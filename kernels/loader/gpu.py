"""The compute capabilities of the visible GPUs, and which code runs on which, without initialising CUDA."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .memory import Memory

__all__ = ["Arch", "covered", "merge", "parse_archs", "requested_archs", "sees_all", "visible_archs"]

# Names of architectures in TORCH_CUDA_ARCH_LIST, expanded as torch does.
_NAMED = {
    "Kepler+Tesla": "3.7",
    "Kepler": "3.5+PTX",
    "Maxwell+Tegra": "5.3",
    "Maxwell": "5.0;5.2+PTX",
    "Pascal": "6.0;6.1+PTX",
    "Volta+Tegra": "7.2",
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}
_ARCH = r"(?i)(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)(\+PTX)?"


class Arch(NamedTuple):
    """The compute capability of a GPU or of compiled code.

    Attributes:
        major: 9 in 9.0.
        minor: 0 in 9.0.
        suffix: ``"a"`` or ``"f"`` for code with features specific to the architecture or family.
        ptx: whether PTX is included, which drivers compile for later GPUs.
    """

    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False

    @classmethod
    def parse(cls, text: str) -> Arch:
        """Parses ``"9.0"``, ``"9.0+PTX"``, ``"10.0a"``, ``"90"`` or ``"sm_90"``.

        Raises:
            ValueError: ``text`` is none of these.
        """
        match = re.fullmatch(_ARCH, text.strip())
        if not match:
            raise ValueError(f"{text!r} is no compute capability; write it as 9.0, 9.0+PTX or 10.0a")
        return cls(int(match[1]), int(match[2]), match[3].lower(), bool(match[4]))

    def __str__(self) -> str:
        """In a form that :meth:`parse` accepts."""
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"

    @property
    def number(self) -> str:
        """The digits and suffix of ``sm_90``."""
        return f"{self.major}{self.minor}{self.suffix}"

    @property
    def flags(self) -> list[str]:
        """Flags for nvcc. Given -gencode flags, torch does not add its own, whose detection fails without a GPU."""
        codes = ["sm", "compute"] if self.ptx else ["sm"]
        return [f"-gencode=arch=compute_{self.number},code={code}_{self.number}" for code in codes]

    def runs_on(self, gpu: Arch) -> bool:
        """Whether code for this arch runs on ``gpu``: same major and no greater minor, or PTX for an earlier arch."""
        if self.suffix == "a":
            return (self.major, self.minor) == (gpu.major, gpu.minor)
        same = self.major == gpu.major and self.minor <= gpu.minor
        return same or (self.ptx and not self.suffix and (self.major, self.minor) <= (gpu.major, gpu.minor))


def covered(gpus: Iterable[Arch], archs: Sequence[Arch]) -> bool:
    """Whether each of ``gpus`` can run code compiled for ``archs``."""
    return all(any(arch.runs_on(gpu) for arch in archs) for gpu in gpus)


def parse_archs(text: str) -> tuple[Arch, ...]:
    """Parses a list like that in TORCH_CUDA_ARCH_LIST: ``"8.0;9.0+PTX"``, ``"Hopper"``; separated by ";", commas or blanks.

    Raises:
        ValueError: as :meth:`Arch.parse`.
    """
    words = [word for word in re.split(r"[;,\s]+", text) if word and word != "native"]
    parts = [part for word in words for part in _NAMED.get(word, word).split(";")]
    return merge(Arch.parse(part) for part in parts)


def merge(archs: Iterable[Arch]) -> tuple[Arch, ...]:
    """Sorts and removes duplicates, and ``9.0`` if there is ``9.0+PTX``."""
    found = set(archs)
    return tuple(sorted(a for a in found if a.ptx or Arch(a.major, a.minor, a.suffix, True) not in found))


def requested_archs() -> tuple[Arch, ...]:
    """The archs in JITACT_ARCHS, else in TORCH_CUDA_ARCH_LIST; none if torch is built without CUDA.

    Raises:
        ValueError: one is not a compute capability.
    """
    if torch.version.cuda is None:
        return ()
    variable = "JITACT_ARCHS" if os.environ.get("JITACT_ARCHS") else "TORCH_CUDA_ARCH_LIST"
    try:
        return parse_archs(os.environ.get(variable, ""))
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from None


def sees_all() -> bool:
    """Whether :func:`visible_archs` has no GPU that CUDA_VISIBLE_DEVICES hides from this process."""
    return torch.cuda.is_initialized() or "CUDA_VISIBLE_DEVICES" not in os.environ


def visible_archs(memory: Memory) -> tuple[Arch, ...]:
    """The compute capabilities of this machine's GPUs; none if all are hidden from this process.

    Asks torch if CUDA is initialised, else NVML, which does not initialise it. NVML can take long without driver persistence,
    so ``memory`` caches the capability of each kind of GPU.
    """
    if torch.version.cuda is None:
        return ()
    if torch.cuda.is_initialized():
        return merge(Arch(*torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return ()
    kinds = _kinds()
    known = [memory.get(f"gpu {kind}") for kind in kinds]
    if not kinds or not all(isinstance(arch, str) and re.fullmatch(_ARCH, arch) for arch in known):
        found = _ask_driver()
        for kind, arch in found:
            memory.put(f"gpu {kind}", str(arch))
        return merge(arch for _, arch in found)
    return merge(Arch.parse(arch) for arch in known)


def _kinds() -> list[str]:
    """The PCI device ID of each GPU that the driver manages, as ``"0x2335"``, which determines the compute capability."""
    try:
        return [
            Path(f"/sys/bus/pci/devices/{address}/device").read_text().strip()
            for address in os.listdir("/proc/driver/nvidia/gpus")
        ]
    except OSError:
        return []


def _ask_driver() -> list[tuple[str, Arch]]:
    """The PCI device ID and compute capability of each GPU, from NVML; empty if NVML is missing or fails."""
    names = ("domain", "bus", "device", "kind", "subsystem")  # kind: device ID in the high half, vendor ID in the low
    parts = [("legacy", ctypes.c_char * 16), *((name, ctypes.c_uint) for name in names), ("address", ctypes.c_char * 32)]
    pci = type("PciInfo", (ctypes.Structure,), {"_fields_": parts})()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return []
    except (OSError, AttributeError):
        return []
    found = []
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
        for i in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            asked = [
                nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(device)),
                nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)),
                nvml.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(pci)),
            ]
            if not any(asked):
                found.append((f"{pci.kind >> 16:#06x}", Arch(major.value, minor.value)))
    nvml.nvmlShutdown()
    return found
