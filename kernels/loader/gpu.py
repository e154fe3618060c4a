"""Which GPUs there are, and which compiled code runs on which, all without initialising CUDA."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .memory import Memory

__all__ = ["Arch", "covered", "parse_archs", "requested_archs", "visible_archs"]

# Names that TORCH_CUDA_ARCH_LIST may hold, as torch expands them.
_NAMED = {
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}
_ARCH = r"(?i)(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)(\+PTX)?"


class Arch(NamedTuple):
    """A compute capability: of a GPU, or one that code is compiled for.

    Attributes:
        major: 9 of 9.0.
        minor: 0 of 9.0.
        suffix: ``"a"`` or ``"f"`` for code that uses what only this arch or family has.
        ptx: whether PTX is kept too, which drivers compile for later GPUs.
    """

    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False

    @classmethod
    def parse(cls, text: str) -> Arch:
        """From ``"9.0"``, ``"9.0+PTX"``, ``"10.0a"``, ``"90"`` or ``"sm_90"``.

        Raises:
            ValueError: ``text`` is none of these.
        """
        match = re.fullmatch(_ARCH, text.strip())
        if not match:
            raise ValueError(f"{text!r} is no compute capability; write it as 9.0, 9.0+PTX or 10.0a")
        return cls(int(match[1]), int(match[2]), match[3].lower(), bool(match[4]))

    def __str__(self) -> str:
        """As :meth:`parse` reads it."""
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"

    @property
    def number(self) -> str:
        """As in ``sm_90``."""
        return f"{self.major}{self.minor}{self.suffix}"

    @property
    def flags(self) -> list[str]:
        """For nvcc. Torch's own arch logic, which fails where there is no GPU, stands back when it sees them."""
        codes = ["sm", "compute"] if self.ptx else ["sm"]
        return [f"-gencode=arch=compute_{self.number},code={code}_{self.number}" for code in codes]

    def runs_on(self, gpu: Arch) -> bool:
        """Whether code compiled for this runs on ``gpu``: same major, minor not above; PTX on all that is later."""
        if self.suffix == "a":
            return (self.major, self.minor) == (gpu.major, gpu.minor)
        same = self.major == gpu.major and self.minor <= gpu.minor
        return same or (self.ptx and not self.suffix and (self.major, self.minor) <= (gpu.major, gpu.minor))


def covered(gpus: Iterable[Arch], archs: Sequence[Arch]) -> bool:
    """Whether each of ``gpus`` can run code compiled for ``archs``."""
    return all(any(arch.runs_on(gpu) for arch in archs) for gpu in gpus)


def parse_archs(text: str) -> tuple[Arch, ...]:
    """From a list as TORCH_CUDA_ARCH_LIST holds it: ``"8.0;9.0+PTX"``, ``"Hopper"``; commas and blanks separate too.

    Raises:
        ValueError: as :meth:`Arch.parse`.
    """
    words = [word for word in re.split(r"[;,\s]+", text) if word and word != "native"]
    parts = [part for word in words for part in _NAMED.get(word, word).split(";")]
    return merge(Arch.parse(part) for part in parts)


def merge(archs: Iterable[Arch]) -> tuple[Arch, ...]:
    """Sorted, each once; ``9.0`` beside ``9.0+PTX`` adds nothing."""
    found = set(archs)
    return tuple(sorted(a for a in found if a.ptx or Arch(a.major, a.minor, a.suffix, True) not in found))


def requested_archs() -> tuple[Arch, ...]:
    """What JITACT_ARCHS names, else TORCH_CUDA_ARCH_LIST; none of it where torch is built without CUDA.

    Raises:
        ValueError: one of the names is no compute capability.
    """
    if torch.version.cuda is None:
        return ()
    variable = "JITACT_ARCHS" if os.environ.get("JITACT_ARCHS") else "TORCH_CUDA_ARCH_LIST"
    try:
        return parse_archs(os.environ.get(variable, ""))
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from None


def visible_archs(memory: Memory) -> tuple[Arch, ...]:
    """Compute capabilities of this machine's GPUs, none if they are hidden from this process.

    Asks torch where CUDA runs already; else the driver's management library, which initialises nothing. That can take long
    on a machine whose driver sleeps, so ``memory`` keeps which kind of GPU has which capability.
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
    """The PCI device of each GPU that the driver holds, as in ``"0x2335"``: the chip, and so the capability, follow from it."""
    try:
        return [
            Path(f"/sys/bus/pci/devices/{address}/device").read_text().strip()
            for address in os.listdir("/proc/driver/nvidia/gpus")
        ]
    except OSError:
        return []


def _ask_driver() -> list[tuple[str, Arch]]:
    """PCI device and capability of each GPU, from NVML; nothing where that is missing or refuses."""
    names = ("domain", "bus", "device", "kind", "subsystem")  # kind: the PCI device in the high half, the vendor in the low
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
