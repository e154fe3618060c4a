"""Softmax and its relatives: activations whose results depend on all elements of a row."""

from .functions import log_softmax, softmax, softmin
from .modules import LogSoftmax, Softmax, Softmax2d, Softmin

__all__ = ["LogSoftmax", "Softmax", "Softmax2d", "Softmin", "log_softmax", "softmax", "softmin"]
