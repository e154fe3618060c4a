"""The functions as modules, which take what those of ``torch.nn`` take and stand where they stand."""

from __future__ import annotations

from torch import Tensor, nn

from . import functions

__all__ = ["COUNTERPARTS", "SETTINGS", "LogSoftmax", "RowModule", "Softmax", "Softmax2d", "Softmin"]


class RowModule(nn.Module):
    """What the modules have in common: nothing but to be told by."""


class Softmax(RowModule, nn.Softmax):
    """``torch.nn.Softmax`` by :func:`jitact.softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        """Softmax along ``dim``."""
        return functions.softmax(input, self.dim)


class LogSoftmax(RowModule, nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` by :func:`jitact.log_softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        """The logarithm of softmax along ``dim``."""
        return functions.log_softmax(input, self.dim)


class Softmin(RowModule, nn.Softmin):
    """``torch.nn.Softmin`` by :func:`jitact.softmin`."""

    def forward(self, input: Tensor) -> Tensor:
        """Softmin along ``dim``."""
        return functions.softmin(input, self.dim)


class Softmax2d(RowModule, nn.Softmax2d):
    """``torch.nn.Softmax2d`` by :func:`jitact.softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        """Softmax along the channels of images.

        Raises:
            ValueError: input is neither one image nor a batch of them.
        """
        if input.dim() not in (3, 4):
            raise ValueError(f"Softmax2d: expected 3 or 4 dimensions, got {input.dim()}")
        return functions.softmax(input, -3)


SETTINGS = ("dim",)
COUNTERPARTS: dict[type[nn.Module], type[RowModule]] = {
    nn.Softmax: Softmax,
    nn.LogSoftmax: LogSoftmax,
    nn.Softmin: Softmin,
    nn.Softmax2d: Softmax2d,
}
