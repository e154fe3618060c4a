"""Softmax and its kin, where elements depend on the row that they are in."""

from .functions import log_softmax, softmax, softmin
from .modules import LogSoftmax, Softmax, Softmax2d, Softmin

__all__ = ["LogSoftmax", "Softmax", "Softmax2d", "Softmin", "log_softmax", "softmax", "softmin"]
