"""The functions as modules, which take what those of ``torch.nn`` take and stand where they stand."""

from __future__ import annotations

from torch import Tensor, nn

from . import functions

__all__ = ["LogSoftmax", "Softmax", "Softmax2d", "Softmin"]


class Softmax(nn.Softmax):
    """``torch.nn.Softmax`` by :func:`jitact.softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        """Softmax along ``dim``."""
        return functions.softmax(input, self.dim)


class LogSoftmax(nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` by :func:`jitact.log_softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        """The logarithm of softmax along ``dim``."""
        return functions.log_softmax(input, self.dim)


class Softmin(nn.Softmin):
    """``torch.nn.Softmin`` by :func:`jitact.softmin`."""

    def forward(self, input: Tensor) -> Tensor:
        """Softmin along ``dim``."""
        return functions.softmin(input, self.dim)


Softmax2d = nn.Softmax2d  # along the channels of images, which is PyTorch's work
