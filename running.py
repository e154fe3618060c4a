"""Runs an activation: checks the arguments of a call, then calls the operators or the formula in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from .autograd import activate, activate_at_once, activate_transformed, check_formula, formula_from_seed
from .configs import (
    BEFORE_2_13,
    alive,
    call_forward,
    configured,
    copied,
    drawn_seed,
    in_dispatch_mode,
    is_exporting,
    is_functionalized,
    is_transformed,
    overwritten,
)
from .records import Activation, by_token, layout
from .records.arguments import DTYPES, check_tensor, is_sharded, is_stand_in, stand_ins
from .records.operands import fitted, fitting, order_in_memory
from .records.tracing import as_constant
from .subclasses.jagged import by_values, is_jagged
from .subclasses.sharded import by_shards

__all__ = ["called_later", "run", "run_fitted", "run_with_operands", "traced"]


def run(x: Tensor, record: Activation, params: tuple, inplace: bool, save: str | None, fast_math: bool) -> Tensor:
    """Applies an activation to one tensor.

    Raises:
        TypeError: ``x`` is not a dense tensor of one of :data:`DTYPES`, or an option has a wrong type.
        ValueError: an option has an invalid value.
        RuntimeError: in place on a leaf that requires a gradient, or on an inference tensor outside of inference mode.
    """
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.layout is not torch.strided or x.is_nested:
        if is_jagged(x):
            return _run_by_parts(record, {layout(record.token).tensors[0]: x}, params, inplace, save, fast_math, False)
        if not is_stand_in(x):
            check_tensor(record, x)
        return called_later(record, {"x": x}, params, inplace, save, fast_math, False)
    if type(x) is not Tensor and is_sharded(x) and not is_exporting():
        return _run_by_parts(record, {layout(record.token).tensors[0]: x}, params, inplace, save, fast_math, False)
    if params or save is not None or inplace is not False or fast_math is not False:
        params = record.check(params, inplace, save, fast_math)
    # In this order: torch.compile cannot trace the lock that a first look at the layout takes before Python 3.12.
    if torch.compiler.is_compiling() or is_transformed() or inplace or record.layout.draws:
        return run_fitted(record, (x,), params, inplace, save, fast_math)
    # The same for one tensor, without loops.
    if torch.is_grad_enabled():
        (x,) = alive((x,))
        if x.requires_grad:
            return activate_at_once(x, configured(record, False, save or record.layout.saves[0], fast_math), params)
    return call_forward(configured(record, False, "input", fast_math), x, *params)


def run_with_operands(
    record: Activation,
    given: dict[str, Any],
    params: tuple,
    inplace: bool,
    save: str | None,
    fast_math: bool,
    training: bool,
    seed: Tensor | None = None,
) -> Tensor:
    """Applies an activation that takes more than ``x`` and numbers. ``given`` has its tensors by name.

    Raises:
        TypeError, ValueError: as :func:`run`, and :func:`fitted`.
    """
    tensors = fitting(record, given)
    if tensors is not None and not inplace and record.in_eval is None and record.spans is None:  # the usual call
        return run_fitted(record, tensors, record.check(params, inplace, save, fast_math), inplace, save, fast_math, seed)
    if tensors is None:
        if stand_ins(*given.values()):
            return called_later(record, given, params, inplace, save, fast_math, training)
        if any([is_jagged(each) or (is_sharded(each) and not is_exporting()) for each in given.values()]):
            return _run_by_parts(record, given, params, inplace, save, fast_math, training, seed)
        tensors = fitted(record, given)
    x = next(iter(given.values()))
    params = record.check(params, inplace, save, fast_math)
    if inplace and tensors[0].shape != x.shape:
        shapes = f"{tuple(x.shape)}, and the result {tuple(tensors[0].shape)}"
        raise ValueError(f"{record.name}: in place the result has the shape of x; that is {shapes}")
    if tensors[0].shape != x.shape and (order := _order_of_larger(record, tensors)) is not None:
        laid = {name: t.permute(order) for name, t in zip(record.layout.tensors, tensors, strict=True)}
        y = run_with_operands(record, laid, params, False, save, fast_math, training, seed)
        return y.permute([order.index(dim) for dim in range(len(order))])
    if inplace and tensors[0].dtype is not x.dtype:  # a wider bias or residual has promoted x
        _check_no_leaf(record, x)
        return write(x, run_with_operands(record, given, params, False, save, fast_math, training, seed))
    if record.in_eval is not None and not training:
        record, params = record.in_eval(*params)
        return run_fitted(record, tensors, params, inplace, None, fast_math)
    if record.spans is not None:
        record.check_span(params, tensors[0].dtype)
    return run_fitted(record, tensors, params, inplace, save, fast_math, seed)


def _run_by_parts(
    record: Activation,
    given: dict[str, Any],
    params: tuple,
    inplace: bool,
    save: str | None,
    fast_math: bool,
    training: bool,
    seed: Tensor | None = None,
) -> Tensor:
    """:func:`run_with_operands`, where some tensors are jagged, or DTensors."""
    x = next(iter(given.values()))
    if inplace:
        _check_no_leaf(record, x)
        # Views of x would be in the history of what is written to it.
        given = {name: each.clone() if is_jagged(each) or is_sharded(each) else each for name, each in given.items()}

    def call(dense: dict[str, Any], seed: Tensor | None) -> Tensor:
        return run_with_operands(record, dense, params, False, save, fast_math, training, seed)

    if any([is_sharded(each) for each in given.values()]):
        draws = layout(record.token).draws and (training or record.in_eval is None)
        y = by_shards(record, given, call, draws=draws, seed=seed, kept=_read_by_backward(record, given, save))
    else:
        y = by_values(record, given, lambda dense: call(dense, seed))
    return write(x, y) if inplace else y


def _read_by_backward(record: Activation, given: dict[str, Any], save: str | None) -> tuple[str, ...]:
    """The names of the DTensors whose shards backward reads, and "" for the result's."""
    spec = layout(record.token)
    sharded = [name for name in spec.tensors if is_sharded(given[name])]
    if torch.compiler.is_compiling() or len(sharded) < len(spec.places) or save not in (None, *spec.saves):
        return ()  # in the two latter cases an error may follow
    first = _first_save(record, tuple([given[name] for name in spec.tensors]), save)
    others = sharded if first == "input" else [name for name in sharded if name in spec.tensors[spec.elements :]]
    return (*[name for name in others if name not in record.unread], *([""] if first == "output" else []))


def _order_of_larger(record: Activation, tensors: tuple[Tensor, ...]) -> list[int] | None:
    """Where ``x`` was broadcast to a tensor that is not contiguous: that one's dimensions, outermost in memory first.

    Results lie as ``x`` does. With the dimensions in this order they lie as that tensor does, which PyTorch's do too. None
    where nothing has to be done, or operands belong to dimensions by their number.
    """
    if len(tensors) > record.layout.elements or record.layout.draws:
        return None
    full = [t for t in tensors[1:] if 0 not in t.stride() and t.numel() > 1]
    if not full or full[0].is_contiguous():
        return None
    order = order_in_memory(full[0])
    return order if order != list(range(len(order))) else None


def called_later(
    record: Activation,
    given: dict[str, Any],
    params: tuple,
    inplace: bool,
    save: str | None,
    fast_math: bool,
    training: bool,
    **fused: Any,
) -> Any:
    """Records a call for later, where some of ``given`` or ``fused`` are proxies of torch.fx rather than tensors."""
    options = {name: value for (name, _), value in zip(record.params, params, strict=True)}
    options |= ({"training": training} if record.in_eval else {}) | ({"inplace": inplace} if record.inplace else {})
    waiting = stand_ins(*given.values(), *fused.values())
    first, *others = given
    named = {name: given[name] for name in others}
    function, options = record.function, options | {"save": save, "fast_math": fast_math}
    return handle_torch_function(function, waiting, given[first], **named, **options, **fused)


def run_fitted(
    record: Activation,
    tensors: tuple[Tensor, ...],
    params: tuple,
    inplace: bool,
    save: str | None,
    fast_math: bool,
    seed: Tensor | None = None,
) -> Tensor:
    """Applies an activation to arguments that have been checked."""
    if torch.compiler.is_compiling() or is_transformed():
        return _run_in_any_way(record, tensors, params, inplace, save, fast_math, seed)
    # The usual call. Looking for all the special cases takes several times as long.
    spec, recorded = record.layout, False
    if torch.is_grad_enabled():
        tensors = alive(tensors)
        for place in spec.places + spec.passed:
            if tensors[place].requires_grad:
                recorded = True
                break
    elif inplace:
        tensors = alive(tensors)
    x, operands = tensors[0], tensors[1:]
    if inplace:
        if operands or spec.draws or in_dispatch_mode() or x.is_neg() or (recorded and x._is_view()):
            return _run_in_any_way(record, tensors, params, inplace, save, fast_math, seed)
        if not recorded:
            return overwritten(x, configured(record, True, "input", fast_math), *params)
        _check_no_leaf(record, x)
        save = save or record.default_save(params)
        before = (copied(x, record),) if save == "input" else ()
        return activate_at_once(x, configured(record, True, save, fast_math), params, before)
    if spec.draws:
        operands = (*operands, drawn_seed(x) if seed is None else seed)
    if recorded:
        save = _first_save(record, tensors, save) if operands else save or spec.saves[0]
        return activate_at_once(x, configured(record, False, save, fast_math), params, (), *operands)
    return call_forward(configured(record, False, "input", fast_math), x, *operands, *params)


def _run_in_any_way(
    record: Activation,
    tensors: tuple[Tensor, ...],
    params: tuple,
    inplace: bool,
    save: str | None,
    fast_math: bool,
    seed: Tensor | None,
) -> Tensor:
    """:func:`run_fitted` in general: also in place, and within torch.compile, torch.func transforms and forward-mode AD."""
    compiling, transformed = torch.compiler.is_compiling(), is_transformed()
    tensors = tensors if compiling else alive(tensors)
    x, others = tensors[0], tensors[1:]
    spec = layout(record.token) if compiling else record.layout  # not unpacked: torch.compile of torch 2.11 reads fields only
    draws, places, passed = spec.draws, spec.places, spec.passed
    records = transformed or (torch.is_grad_enabled() and any([tensors[place].requires_grad for place in (*places, *passed)]))
    name, version, *saves = traced(record.token, fast_math).split(",") if compiling else ("", "")
    asked, dissolves = save, bool(saves) and (save is None or save in saves)
    if inplace and save is None and len(places) == 1:
        save = record.default_save(params)
        asked = save if save in saves else None
    if records:
        save = _first_save(record, tensors, save)
    if inplace:
        _check_no_leaf(record, x)
        if not transformed and not compiling:
            shares = _share_storage if records else _overlaps  # what is kept must not share x's count of changes either
            others = tuple([each.clone() if shares(x, each) else each for each in others])
        elif records and not transformed:
            others = _copies_in_graph(others, passed)
        # A selective checkpoint that keeps results does not call an operator again, which then changes nothing; copy_ it does.
        if transformed or compiling or in_dispatch_mode() or x.is_neg() or (records and x._is_view()):
            # What backward keeps must not be overwritten.
            before = copied(x, record) if transformed or dissolves or (records and save == "input") else x
            if compiling and records and BEFORE_2_13 and before is x:
                before = x.neg().neg()  # a copy: torch before 2.13 takes a clone for x itself, and keeps the input in any case
            return write(x, run_fitted(record, (before, *others), params, False, asked if dissolves else save, fast_math, seed))
    # Neither transforms nor torch.export can have PyTorch's functions that make a DTensor of shards.
    by_pytorch = (compiling and is_sharded(x)) or (transformed and (compiling or others or draws or is_functionalized()))
    if by_pytorch or (transformed and _wraps_parts(x)):
        return _formula(record, tensors, params, seed if draws else None)
    if draws and seed is None:
        seed = torch.ops.jitact.seed(x) if compiling else drawn_seed(x)  # the operator is that of compiling.seeds
    operands = (*others, seed) if draws else others
    if compiling and is_exporting():
        return getattr(torch.ops.jitact, name)(x, *operands, *params)
    if dissolves:
        return getattr(torch.ops.jitact, name)(x, *operands, *params, save=asked or "", version=version)
    if transformed or not records:
        save = "input"  # transforms hide strides, which masks depend on; with nothing recorded, nothing is kept
    config = configured(record, inplace, save, fast_math)
    if transformed:
        return activate_transformed(x, config, params)
    if records:
        if compiling:  # torch.compile takes no tensor twice as an argument of an autograd function
            operands = _without_repeats(x, operands)
        before = (copied(x, record),) if inplace and save == "input" else ()
        return activate(x, config, params, before, *operands)
    if inplace:
        return overwritten(x, config, *operands, *params)
    return call_forward(config, x, *operands, *params)


def _wraps_parts(x: Tensor) -> bool:
    """Whether a transform's tensor has a DTensor or a jagged tensor inside."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return is_sharded(x) or is_jagged(x)


def _check_no_leaf(record: Activation, x: Tensor) -> None:
    """Raises RuntimeError if ``x``, to be changed in place, is a leaf that requires a gradient."""
    if torch.is_grad_enabled() and x.is_leaf and x.requires_grad and not is_transformed():
        what = "a leaf that requires a gradient cannot be changed in place; apply it to a copy, x.clone()"
        raise RuntimeError(f"{record.name}: {what}")


def _share_storage(x: Tensor, other: Tensor) -> bool:
    return x.untyped_storage()._cdata == other.untyped_storage()._cdata


def _copies_in_graph(others: tuple[Tensor, ...], passed: tuple[int, ...]) -> tuple[Tensor, ...]:
    """``others``, with copies of those that backward keeps and that may be views of ``x``.

    What torch.compile traces cannot ask which tensors share memory. A learned tensor of a module is no view, and of tensors at
    the places ``passed``, as a residual, backward keeps nothing.
    """
    learned = [each.is_leaf and each.requires_grad for each in others]
    return tuple([each if learned[i] or i + 1 in passed else each.clone() for i, each in enumerate(others)])


def _overlaps(x: Tensor, other: Tensor) -> bool:
    """Whether writing an element of ``x`` may change an element of ``other`` at a different index."""
    if not _share_storage(x, other) or not x.numel() or not other.numel():
        return False
    (start, end), (begin, stop) = _span(x), _span(other)
    alike = start == begin and x.shape == other.shape and x.stride() == other.stride() and x.dtype is other.dtype
    return not alike and start < stop and begin < end


def _span(t: Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) of the elements in the storage."""
    last = sum([(size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)])
    return t.storage_offset() * t.itemsize, (t.storage_offset() + last + 1) * t.itemsize


def _without_repeats(x: Tensor, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``operands``, with a view in place of each tensor that is ``x`` or an earlier operand."""
    seen, found = [x], []
    for each in operands:
        found.append(each.view_as(each) if any([each is other for other in seen]) else each)
        seen.append(each)
    return tuple(found)


def _first_save(record: Activation, tensors: tuple[Tensor, ...], save: str | None) -> str:
    """What backward keeps: ``save`` if given, else the default if that is enough for all gradients required, else the input.

    Raises:
        ValueError: ``save`` is not enough for a gradient that is required.
    """
    spec = layout(record.token)
    first = save or spec.saves[0]
    if first == "input":
        return first
    enough = spec.from_bit if first == "bit" else spec.places[:1]
    missing = [place for place in spec.places if place not in enough and tensors[place].requires_grad]
    if not missing or not torch.is_grad_enabled():
        return first
    if save is not None:
        name = spec.tensors[missing[0]]
        raise ValueError(f"{record.name}: save={save!r} is not enough for the gradient of {name}, which needs save='input'")
    return "input"


def write(x: Tensor, y: Tensor) -> Tensor:
    """Copies ``y`` into ``x``, recorded by autograd, and returns ``x``."""
    if not torch.compiler.is_compiling() and is_transformed() and is_functionalized():
        return x.fill_(-0.0).add_(y)  # -0.0 + y is y for all y; functionalize turns copy_ into an operator without derivative
    return x.copy_(y)


@as_constant
def traced(token: str, fast_math: bool) -> str:
    """The operator for an activation in graphs: name, version, and, if Inductor decomposes it, the kinds of ``save`` it has.

    One string, separated by commas: every supported torch.compile can embed it as a constant.
    """
    from .compiling.operators import operators  # not at the top, to keep importing jitact fast

    made = operators(by_token[token], fast_math, _recorded)
    return ",".join([made.name, made.version, *(made.formula.saves if made.formula else ())])


def _recorded(record: Activation, arguments: tuple, fast_math: bool) -> Tensor:
    """The activation as autograd records it in eager mode, for operators of graphs that have no gradient of their own."""
    count = len(record.layout.tensors)
    operands, params = arguments[: count + record.layout.draws], arguments[count + record.layout.draws :]
    if is_transformed():
        seed = operands[count:] if record.by_formula else ()  # other formulas draw their own numbers
        return _formula(record, operands[:count], params, *seed)
    config = configured(record, False, _first_save(record, operands, None), fast_math)
    return activate(operands[0], config, params, (), *operands[1:])


def _formula(
    record: Activation, tensors: tuple[Tensor, ...], params: tuple[float, ...], seed: Tensor | None = None
) -> Tensor:
    """The activation by PyTorch's operations, for transforms that the operators do not support.

    Raises:
        RuntimeError: it has no formula, or none that takes ``seed``; torch.compile then runs the call uncompiled, unless
            fullgraph=True.
    """
    check_formula(record)
    if seed is not None:
        return formula_from_seed(record, tensors, params, seed)
    if len(tensors) == 1:
        _evaluated(record.token)
    return record.reference(*tensors, *params)


@as_constant
def _evaluated(token: str) -> bool:
    """Evaluates a formula once outside of tracing: it may fill caches in ways that torch.compile cannot trace."""
    record = by_token[token]
    record.reference(torch.empty(0), *[default for _, default in record.params])
    return True
