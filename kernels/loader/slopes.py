"""Generates kernel files from another one that compute its derivatives as activations, for higher-order derivatives."""

from __future__ import annotations

from .signature import Operand, prepared
from .source import KernelSource
from .uses import includes_of, line_directive, with_own_macros

__all__ = ["from_bit_source", "from_output_source", "gradients_source", "slope_source"]


def slope_source(source: KernelSource, from_output: bool) -> KernelSource:
    """For an activation of one tensor: ``forward(x, numbers...)`` is its derivative at ``x``, or where its output is ``x``."""
    operands = _own_names(source)
    if from_output:
        slopes = f"""ELEMENTWISE T slope(T x{_declared(operands[1:], ", ")}) {{
  return activation::backward_from_output({", ".join(["T(1)", "x", *_given(operands[1:])])});
}}
"""
        first, called = "T x", "slope(x"
    else:
        x = operands[0].in_file
        slopes, first, called = _gradient(source, operands, 0), f"T {x}", f"slope_0(T(1), {x}"
    arguments = "".join(f", {operand.in_file}" for operand in operands[1:])
    text = f"{slopes}\nELEMENTWISE T forward({first}{_declared(operands[1:], ', ')}) {{ return {called}{arguments}); }}\n"
    return _made_of(source, f"{source.name}_slope{'_from_output' if from_output else ''}", text)


def from_output_source(source: KernelSource) -> KernelSource:
    """For an activation with a gradient from its output ``y``: ``forward(y, dy, operands...)`` is that gradient."""
    others = [operand for operand in _own_names(source) if operand.role != "element"]
    body = f"activation::backward_from_output({', '.join(['dy', 'y', *_given(others)])})"
    text = f"ELEMENTWISE T forward(T y, T dy{_declared(others, ', ')}) {{ return {body}; }}\n"
    return _made_of(source, f"{source.name}_from_output", text)


def from_bit_source(source: KernelSource) -> KernelSource:
    """For an activation with several gradients from a bit: ``forward(bit, dy, operands..., which)`` is one of them.

    The bit is 1 or 0. Results are for single elements, without summation over channels.
    """
    operands, last = _own_names(source), source.signature.bit_gradients - 1
    others = [operand for operand in operands if operand.role != "element"]
    chosen = "".join(f"which == {g} ? found.of[{g}] : " for g in range(last))
    text = f"""ELEMENTWISE T forward(T bit, T dy{_declared(others, ", ")}, Number<T> which) {{
  const auto found = {_from_bit(operands, "bit != 0")};
  return {chosen}found.of[{last}];
}}
"""
    return _made_of(source, f"{source.name}_from_bit", text)


def gradients_source(source: KernelSource) -> KernelSource:
    """For any activation: ``forward(operands..., dy, which)`` is one of its gradients, for a single element.

    The gradient of a channel operand is an element's contribution, without summation. Random numbers are the activation's own
    for the same seed and the same layout of the first tensor.
    """
    operands = _own_names(source)
    slopes = "\n".join(_gradient(source, operands, g) for g in range(source.signature.gradients))
    given = ", ".join(["dy", *(operand.in_file for operand in operands)])
    chosen = "".join(f"which == {g} ? slope_{g}({given}) : " for g in range(source.signature.gradients - 1))
    body = f"{chosen}slope_{source.signature.gradients - 1}({given})"
    text = f"{slopes}\nELEMENTWISE T forward({_declared(operands)}, T dy, Number<T> which) {{\n  return {body};\n}}\n"
    return _made_of(source, f"{source.name}_gradients", text)


def _made_of(source: KernelSource, name: str, text: str) -> KernelSource:
    includes = includes_of(source.text)
    file = f"namespace activation {{\n{line_directive(source.path)}\n{source.text}\n}}"
    return source._replace(name=name, text=f"{includes}\n{with_own_macros(source.text, file)}{text}", numbers=())


def _own_names(source: KernelSource) -> list[Operand]:
    """The operands under new names, which clash with nothing in the file."""
    return [operand._replace(in_file=f"a{k}") for k, operand in enumerate(source.signature.operands)]


def _declared(operands: list[Operand], before: str = "") -> str:
    types = ["Number<T>" if operand.role == "number" else operand.type for operand in operands]
    declared = ", ".join(f"{type_} {operand.in_file}" for type_, operand in zip(types, operands, strict=True))
    return f"{before}{declared}" if declared else ""


def _given(operands: list[Operand]) -> list[str]:
    """The operands as arguments of the file's functions."""
    unmarked = [operand.role == "number" and operand.type == "T" for operand in operands]
    return [f"T({operand.in_file})" if bare else operand.in_file for operand, bare in zip(operands, unmarked, strict=True)]


def _gradient(source: KernelSource, operands: list[Operand], g: int) -> str:
    """A function ``slope_<g>(dy, operands...)``: gradient ``g``, by the file's own function, or derived with dual numbers."""
    signature = source.signature
    broadcast = [operand for operand in operands if operand.role in ("channel", "row")]
    changed = broadcast[len(broadcast) - prepared(source.text) :]
    if "backward" in signature.functions and not changed:
        which = f".of[{g}]" if signature.gradients > 1 else ""
        body = f"return activation::backward({', '.join(['dy', *_given(operands)])}){which};"
    elif "backward_from_bit" in signature.functions and not changed:
        bit = f"activation::keeps({', '.join(_given(operands))})"
        body = f"return {_from_bit(operands, bit)}{f'.of[{g}]' if signature.bit_gradients > 1 else ''};"
    else:
        body = _derived(operands, signature.differentiable[g].name, changed)
    return f"ELEMENTWISE T slope_{g}(T dy, {_declared(operands)}) {{\n  {body}\n}}\n"


def _from_bit(operands: list[Operand], bit: str) -> str:
    """A call of ``backward_from_bit``."""
    others = _given([operand for operand in operands if operand.role != "element"])
    return f"activation::backward_from_bit({', '.join(['dy', bit, *others])})"


def _derived(operands: list[Operand], by: str, changed: list[Operand]) -> str:
    """The body of a function that differentiates by the operand ``by`` with dual numbers; ``prepare`` changes ``changed``."""
    duals = {}
    for operand in operands:
        derivative = ", T(1)" if operand.name == by else ""
        dual = operand.in_file if operand.role == "random" else f"jitact::Dual<T>(T({operand.in_file}){derivative})"
        marked = operand.type.removesuffix("<T>")
        duals[operand.in_file] = dual if marked == "T" else f"{marked}<jitact::Dual<T>>({dual})"
    lines = [f"auto {each.in_file}_ = {duals[each.in_file]};" for each in changed]
    if changed:
        lines.append(f"activation::prepare({', '.join(f'{each.in_file}_' for each in changed)});")
        duals |= {each.in_file: f"{each.in_file}_" for each in changed}
    return "\n  ".join([*lines, f"return dy * activation::forward({', '.join(duals.values())}).derivative;"])
