"""Which parts of the sources an exported file needs, by its operations, dtypes, devices and kernel file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..kernels.loader.signature import prepared
from ..kernels.loader.source import KernelSource
from .conditions import Facts
from .extract import Extract, extract

__all__ = ["DEVICES", "DTYPES", "OF_TORCH", "Build"]

DTYPES = {
    "fp32": ("torch.float32", "f32", 4),
    "fp64": ("torch.float64", "f64", 8),
    "fp16": ("torch.float16", "f16", 2),
    "bf16": ("torch.bfloat16", "bf16", 2),
}
"""By name: PyTorch's name, the enumerator of ``Dtype``, and the bytes per element."""
OF_TORCH = {text: name for name, (theirs, *_) in DTYPES.items() for text in (theirs, theirs.removeprefix("torch."))}
"""The same names by PyTorch's, with ``torch.`` and without."""

DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class Build:
    """What an exported file is for.

    Attributes:
        source: the kernel file.
        save: what forward saves for backward: "input", "output" or "bit"; None if there is no backward.
        dtypes: keys of :data:`DTYPES`, in their order.
        devices: of :data:`DEVICES`.
        own: the broadcast operands whose dtype may differ from the elements'.
    """

    source: KernelSource
    save: str | None
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    own: tuple[str, ...] = ()

    @cached_property
    def wide(self) -> tuple[str, ...]:
        """The operands of ``own`` that may be float32 with 16-bit elements."""
        return self.own if any(DTYPES[each][2] == 2 for each in self.dtypes) else ()

    @cached_property
    def sums(self) -> bool:
        """Whether backward sums gradients of broadcast operands."""
        return self.save == "input" and bool(self.numbers["kSums"])

    @cached_property
    def derives(self) -> bool:
        """Whether anything is differentiated by dual numbers."""
        written_out = self.numbers["kHasBackward"] or self.numbers["kSavesBit"]
        return self.save == "input" and (not written_out or bool(self.sums and self.numbers["kPrepares"]))

    @cached_property
    def operations(self) -> tuple[str, ...]:
        """The enumerators of ``Op`` that the file calls."""
        if self.save is None:
            return ("forward",)
        if self.save == "input":
            return ("forward", "backward", "backward_sums") if self.sums else ("forward", "backward")
        kept = ("forward_bit",) if self.save == "bit" else ()
        return ("forward", *kept, f"backward_from_{self.save}")

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The constants of signature.cuh, which array sizes and conditions consist of."""
        signature = self.source.signature
        roles = [operand.role for operand in signature.operands]
        with_gradient = [role for role in roles if role in ("element", "channel", "row")][: signature.gradients]
        elements = with_gradient.count("element")
        broadcast, changed = roles.count("channel") + roles.count("row"), prepared(self.source.text)
        functions, singles = signature.functions, max(changed, self.source.singles)
        return {
            "kArguments": len(roles),
            "kElements": roles.count("element"),
            "kNumbers": roles.count("number"),
            "kBroadcast": broadcast,
            "kRandom": roles.count("random"),
            "kGradients": signature.gradients,
            "kElementGradients": elements,
            "kSums": signature.gradients - elements,
            "kBitGradients": signature.bit_gradients,
            "kBitSums": 0,  # with sums, files save the inputs instead
            "kHasBackward": "backward" in functions,
            "kSavesBit": "bit" in signature.saves,
            "kSavesOutput": "output" in signature.saves,
            "kPrepares": changed > 0,
            "kPrepared": changed,
            "kUnprepared": broadcast - changed,
            "kSingles": singles,
            "kMany": broadcast - singles,
            "kPlain": len(roles) == 1,
            "kStreams": False,  # non-temporal stores, whose instructions the exporting machine may have but another not
            "kAlwaysRows": False,
        }

    @cached_property
    def facts(self) -> Facts:
        """The known values of names in conditions, for :func:`~jitact.exporting.extract.extract`."""
        facts = {name: frozenset([value]) for name, value in self.numbers.items()}
        operations = frozenset(f"Op::{each}" for each in self.operations)
        dtypes = frozenset(f"Dtype::{DTYPES[each][1]}" for each in self.dtypes)
        roles = {operand.role for operand in self.source.signature.operands}
        types = {operand.type for operand in self.source.signature.operands}
        facts |= {"Op": operations, "op": operations, "call.op": operations}
        facts |= {"Dtype": dtypes, "dtype": dtypes, "call.dtype": dtypes}
        facts |= {"sizeof(S)": frozenset(DTYPES[each][2] for each in self.dtypes)}
        sizes = {DTYPES[each][2] for each in self.dtypes}
        facts |= {"sizeof(T)": frozenset(max(size, 4) for size in sizes)}
        facts |= {"std::is_same_v<V,float>": frozenset(size != 8 for size in sizes)}
        full = {"Accuracy::full"} if max(sizes) > 2 or self.numbers["kPrepares"] else set()
        facts |= {"accuracy": frozenset(full | ({"Accuracy::narrow"} if 2 in sizes else set()))}
        facts |= {"Role": frozenset(f"Role::{each}" for each in roles)}
        kinds = {"element": {"element"}, "number": {"number"}, "random": {"random"}, "broadcast": {"channel", "row"}}
        for kind, members in kinds.items():
            known = frozenset(role in members for role in roles)
            facts |= {f"is_{kind}(kRoles.of[k])": known, f"is_{kind}(role)": known}
        facts |= {} if self.numbers["kMany"] else {"counted": frozenset([False])}
        for name in ("Number", "Channel", "Row", "Random"):
            facts |= {} if f"{name}<T>" in types else {f"std::is_same_v<A,{name}<Single>>": frozenset([False])}
        writes = {1} | ({self.numbers["kElementGradients"]} if self.save == "input" else set())
        facts |= {"writes(op)": frozenset(writes)}
        facts |= {"reads_bits(op)": frozenset(each.startswith("backward_from_bit") for each in self.operations)}
        facts |= {"summed(op)": frozenset({0} | ({self.numbers["kSums"]} if self.sums else set()))}
        facts |= {"summed(call.op)": facts["summed(op)"]}
        if not self.derives:
            facts |= {name: frozenset([False]) for name in ("HasDerivative<T>", "HasDerivative<A>")}
        if not self.wide:
            wide = ("launch.broadcast[b].wide", "is_wide(b)", "folds.wide[k]", "operand.wide", "call.broadcast[s].wide")
            facts |= {name: frozenset([False]) for name in wide}
        # Exported files pass dense tensors only.
        facts |= {name: frozenset([True]) for name in ("dense", "kDense<op>", "call.dense")}
        return facts

    @cached_property
    def extract(self) -> Extract:
        """The C++ and CUDA of the file."""
        roots = [f"run_{device}" for device in self.devices]
        roots += ["workspace_bytes"] if self.sums and "cuda" in self.devices else []
        dtypes = [f"Dtype::{DTYPES[each][1]}" for each in self.dtypes]
        return extract(self.source, self.facts, roots, dtypes, self.devices)
