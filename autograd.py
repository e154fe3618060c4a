"""How an activation runs: the operators behind it, what backward keeps, and the autograd functions around both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function

from . import kernels
from .compiling.operators import operators
from .records import DTYPES, Activation, by_token, check_tensor, is_stand_in, layout

__all__ = [
    "Config",
    "call",
    "configure",
    "configured",
    "gradients",
    "is_exporting",
    "is_transformed",
    "load",
    "run",
    "run_fitted",
    "run_with_operands",
]

BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether torch.compile is one that keeps inputs of autograd functions which nobody asked for; 2.11 was seen to."""


class Config(NamedTuple):
    """How a call runs, everything but the tensors and the numbers: the options, completed, and the operators they lead to.

    Attributes:
        record: of the activation.
        inplace: whether the first tensor is overwritten.
        save: what backward keeps.
        forward_op: the operator of forward.
        backward_op: the operator of backward.
        places: of the tensors, those that ``backward_op`` gives gradients of, in its order.
        by_bits: whether ``backward_op`` takes a number whose bits tell which gradients are wanted.
        passed: of the tensors, those whose gradient is ``dy``.
        elements: how many of the tensors are elements.
    """

    record: Activation
    inplace: bool
    save: str
    forward_op: Callable
    backward_op: Callable
    places: tuple[int, ...]
    by_bits: bool
    passed: tuple[int, ...]
    elements: int


def configure(record: Activation, inplace: bool, save: str, fast_math: bool) -> Config:
    """Finds the operators of a call, and compiles them unless they are there. The options are checked."""
    library = load(record.token, fast_math)
    laid = layout(record.token)
    forward = ("forward_bit" if save == "bit" else "forward") + ("_" if inplace else "")
    backward = "backward" if save == "input" else f"backward_from_{save}"
    ops = [getattr(torch.ops.jitact, f"{library}_{kind}").default for kind in (forward, backward)]
    places = laid.places
    several = save == "input" and len(places) > 1
    return Config(record, inplace, save, *ops, places if several else places[:1], several, laid.passed, laid.elements)


def configured(record: Activation, inplace: bool, save: str, fast_math: bool) -> Config:
    """:func:`configure`, with what it returns kept by the record; not where torch.compile traces it."""
    if torch.compiler.is_compiling():
        return configure(record, inplace, save, fast_math)
    config = record.configs.get((inplace, save, fast_math))
    if config is None:
        config = record.configs[inplace, save, fast_math] = configure(record, inplace, save, fast_math)
    return config


def load(token: str, fast_math: bool) -> str:
    """The first part of the names of a record's operators, compiled unless they are there."""
    return kernels.load(by_token[token].source, fast_math=fast_math).name


def traced(token: str, fast_math: bool) -> str:
    """Of the operators that stand for an activation in graphs: name, version, and what they can keep if they dissolve.

    As text with commas, which every torch.compile carries.
    """
    made = operators(by_token[token], fast_math, _recorded)
    return ",".join([made.name, made.version, *(made.formula.saves if made.formula else ())])


# What torch.compiler.assume_constant_result sets, without its import of the whole compiler: tracing looks no further inside.
load._dynamo_marked_constant = traced._dynamo_marked_constant = True


def _recorded(record: Activation, arguments: tuple, fast_math: bool) -> Tensor:
    """What an operator gives where something is recorded, by those that have no gradient of their own."""
    tensors, _, draws, _, _ = record.layout
    operands, params = arguments[: len(tensors) + draws], arguments[len(tensors) + draws :]
    if is_transformed():
        return _formula(record, operands[: len(tensors)], params)
    config = configured(record, False, _first_save(record, operands, None), fast_math)
    return _Activate.apply(operands[0], config, params, (), *operands[1:])


def call(operator: Callable, *arguments: Any) -> Any:
    """Calls an operator, with PyTorch's own error where memory is short.

    Through the C interface of the operators every exception is a RuntimeError. Asking for the memory again raises the one
    that users know how to catch, torch.OutOfMemoryError.
    """
    try:
        return operator(*arguments)
    except RuntimeError as error:
        raise _torchs_own(error, arguments) from None


def _torchs_own(error: RuntimeError, arguments: tuple) -> RuntimeError:
    if "out of memory" not in str(error):  # as binding.cpp says it
        return error
    try:
        for each in arguments:
            if isinstance(each, Tensor):
                torch.empty_like(each)
    except RuntimeError as own:
        return own
    return error


def overwritten(x: Tensor, operator: Callable, *arguments: Any) -> Tensor:
    """Changes ``x`` in place by an operator, with nothing recorded; returns ``x``.

    Operators that are made outside of PyTorch do not tell autograd that ``x`` has changed: this does.

    Raises:
        RuntimeError: ``x`` is an inference tensor, outside of inference mode.
    """
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError("an inference tensor cannot be changed in place outside of inference mode; clone it first")
    call(operator, x, *arguments)
    torch.autograd.graph.increment_version(x)
    return x


def write(x: Tensor, y: Tensor) -> Tensor:
    """Puts ``y`` into ``x``, which records it, and returns ``x``."""
    if not torch.compiler.is_compiling() and is_transformed() and _functionalized():
        return x.fill_(-0.0).add_(y)  # the same, as -0 + y is y; and what functionalize makes of copy_ has no derivative
    return x.copy_(y)


def strides_of_bits(y: Tensor) -> tuple[int, ...]:
    """The strides in whose order a mask holds the bits of ``y``: those of a dense copy where ``y`` is a view with gaps."""
    return y.stride() if y.is_contiguous() else torch.empty_like(y, device="meta").stride()


def _copied(x: Tensor, record: Activation) -> Tensor:
    """A copy of ``x``.

    Raises:
        RuntimeError: its storage was freed behind it, as FSDP does, where PyTorch's own copy would crash.
    """
    in_memory = type(x) is Tensor and not torch.compiler.is_compiling() and not is_transformed()
    if in_memory and x.numel() and not x.untyped_storage().nbytes():
        raise RuntimeError(f"{record.name}: a tensor has elements, but its data is not allocated (yet, or any more)")
    return x.clone()


def in_order(dy: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``dy`` in memory, with these strides; copied if it has others."""
    if dy.stride() == strides and (torch.compiler.is_compiling() or not dy._is_zerotensor()):
        return dy
    return torch.empty_strided(dy.shape, strides, dtype=dy.dtype, device=dy.device).copy_(dy)


def is_batched(dy: Tensor) -> bool:
    """Whether what looks like one gradient is, or may be, a batch of them, whose memory is not that of one."""
    if torch.compiler.is_compiling():
        return False
    return is_transformed() or torch._C._functorch.is_legacy_batchedtensor(dy)  # torch.vmap's, and is_grads_batched's


def by_slope(dy: Tensor, slope: Tensor) -> Tensor:
    """``dy * slope`` by operations of PyTorch, which know batches and tangents, in ``dy``'s dtype; 0 where the slope is."""
    return torch.where(slope == 0, slope, dy * slope).to(dy.dtype)


class _Activate(torch.autograd.Function):
    """Forward, keeping for backward what ``config.save`` names, and the operands beside ``x``.

    It has forward(ctx, ...), because where setup_context stands apart, PyTorch inspects the signature of forward in every call,
    which takes longer than all the rest; and no jvp, because torch.compile accepts no Function that defines one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, config: Config, params: tuple[float, ...], before: tuple[Tensor, ...] = (), *others: Tensor
    ) -> Tensor:
        """``before`` holds a copy of ``x`` where that is changed in place and kept.

        It was made outside, so that it has a history for second derivatives, and is no argument to autograd, as it gets no
        gradient, which compiled autograd would not take.
        """
        y = call(config.forward_op, x, *others, *params)
        kept = before[0] if before else x
        if config.save == "bit":
            y, kept = (x, y) if config.inplace else y
            ctx.strides = strides_of_bits(y)
        if config.inplace:
            y = x
            ctx.mark_dirty(x)
        if config.passed or (config.elements > 1 and config.save != "input"):
            others = [t for place, t in enumerate(others, 1) if _is_kept(config, place)]
        ctx.save_for_backward(y if config.save == "output" else kept, *others)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.params = config, params
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        config = ctx.config
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if dy is None:
            return tuple(found)
        kept, *others = ctx.saved_tensors
        for place in config.passed:
            found[_argument(place)] = dy
            if config.save == "input":
                others.insert(place - 1, kept)  # of which nothing is read
        if config.save == "input" and others:
            wanted = [ctx.needs_input_grad[_argument(place)] for place in config.places]
            slopes = gradients(config, ctx.params, dy, (kept, *others), wanted) if any(wanted) else [None] * len(wanted)
            for place, gradient in zip(config.places, slopes, strict=True):
                found[_argument(place)] = gradient
        else:
            found[0] = _gradient(ctx, dy, kept, others)
        return tuple(found)


def _is_kept(config: Config, place: int) -> bool:
    """Whether backward wants an operand beside the first."""
    return place not in config.passed and (config.save == "input" or place >= config.elements)


def _argument(place: int) -> int:
    """Which argument of :meth:`_Activate.forward` a tensor is."""
    return place + 3 if place else 0


class _ActivateTransformed(_Activate):
    """Forward within torch.func's transforms and forward mode: never in place, keeping the input."""

    @staticmethod
    def forward(x: Tensor, config: Config, params: tuple[float, ...]) -> Tensor:
        return call(config.forward_op, x, *params)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, ctx.config, ctx.params = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        return None if dy is None else _gradient(ctx, dy, *ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: Any) -> Tensor:
        return _gradient(ctx, dx, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, config: Config, params: tuple[float, ...]) -> tuple:
        return _ActivateTransformed.apply(x, config, params), in_dims[0]


class _Gradient(torch.autograd.Function):
    """Backward as a function of ``dy`` and what was kept, itself differentiable."""

    @staticmethod
    def forward(dy: Tensor, kept: Tensor, config: Config, params: tuple[float, ...]) -> Tensor:
        return call(config.backward_op, dy, kept, *params)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        dy, kept, ctx.config, ctx.params = inputs
        ctx.save_for_backward(dy, kept)
        if is_transformed():
            ctx.save_for_forward(dy, kept)
        ctx.set_materialize_grads(False)
        ctx.strides = output.stride()

    @staticmethod
    def backward(ctx: Any, ddx: Tensor | None) -> tuple:
        if ddx is None:
            return None, None, None, None
        curvature = _curvature(ctx)
        return _gradient(ctx, ddx, ctx.saved_tensors[1]), None if curvature is None else ddx * curvature, None, None

    @staticmethod
    def jvp(ctx: Any, ddy: Tensor | None, dkept: Tensor | None, *_: Any) -> Tensor:
        curvature = None if dkept is None else _curvature(ctx)
        if curvature is None:
            return torch.zeros_like(ctx.saved_tensors[0]) if ddy is None else _gradient(ctx, ddy, ctx.saved_tensors[1])
        return dkept * curvature if ddy is None else torch.addcmul(_gradient(ctx, ddy, ctx.saved_tensors[1]), dkept, curvature)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, dy: Tensor, kept: Tensor, config: Config, params: tuple[float, ...]) -> tuple:
        dy, kept = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((dy, kept), in_dims, strict=False)
        )
        return _Gradient.apply(dy, kept, config, params), 0


class _GradientCompiled(_Gradient):
    """For torch.compile, which accepts no Function that defines jvp, and needs none."""

    jvp = torch.autograd.Function.jvp


def _gradient(ctx: Any, dy: Tensor, kept: Tensor, others: list[Tensor] | tuple[()] = ()) -> Tensor:
    """``dy`` times the slope: an activation being elementwise, the derivative in forward and in reverse mode alike."""
    config, params = ctx.config, ctx.params
    if config.save == "bit":
        differentiable = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if is_batched(dy) or (others and differentiable):
            return by_slope(dy, _slope(config, dy, ctx.strides, kept, others, params))
        dy = in_order(dy, ctx.strides)
    if others and config.save == "output" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        further = configured(config.record.from_output, False, "input", False)
        return _Activate.apply(kept, further, params, (), dy, *others)
    if others or (not torch.is_grad_enabled() and not is_transformed()):
        return call(config.backward_op, dy, kept, *others, *params)
    return (_GradientCompiled if torch.compiler.is_compiling() else _Gradient).apply(dy, kept, config, params)


def _slope(
    config: Config, dy: Tensor, strides: tuple[int, ...], mask: Tensor, others: list[Tensor], params: tuple[float, ...]
) -> Tensor:
    """The slope at each element: in float32 at least, where it does not hang on random numbers, which differ by dtype."""
    draws = layout(config.record.token).draws
    dtype = dy.dtype if draws else torch.promote_types(dy.dtype, torch.float32)
    others = [t.to(dtype) if t.is_floating_point() else t for t in others]
    ones = torch.empty_strided(dy.shape, strides, dtype=dtype, device=dy.device).fill_(1)
    return call(config.backward_op, ones, mask, *others, *params)


def _curvature(ctx: Any) -> Tensor | None:
    """``dy`` times the derivative of the slope by what was kept, from the reference; None where the slope is constant."""
    (dy, kept), config = ctx.saved_tensors, ctx.config
    if "bit" in config.record.saves:
        return None
    reference = config.record.gradient_reference
    _, vjp = torch.func.vjp(lambda k: reference(dy, k, ctx.params, config.save), kept)
    return vjp(torch.ones_like(dy))[0]


class _Gradients(torch.autograd.Function):
    """The gradients of several operands as functions of ``dy`` and those, themselves differentiable."""

    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, config: Config, params: tuple[float, ...], wanted: tuple[bool, ...], *operands: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(dy, *operands)
        ctx.config, ctx.params, ctx.wanted = config, params, wanted
        return _call_backward(config, params, wanted, dy, operands)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        dy, *operands = ctx.saved_tensors
        needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]]
        ddy, *found = _second(ctx.config, ctx.params, ctx.wanted, gradients, needs, dy, tuple(operands))
        return ddy, None, None, None, *found


def _call_backward(
    config: Config, params: tuple[float, ...], wanted: tuple[bool, ...], dy: Tensor, operands: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    if not config.by_bits:
        return (call(config.backward_op, dy, *operands, *params),)
    bits = sum([1 << g for g, each in enumerate(wanted) if each])
    return tuple(call(config.backward_op, dy, *operands, *params, bits))


def gradients(
    config: Config, params: tuple[float, ...], dy: Tensor, operands: tuple[Tensor, ...], wanted: list[bool]
) -> list[Tensor | None]:
    """The gradients of several operands, the seed of random numbers last; None of those that are not wanted."""
    if is_batched(dy):
        return _batched_gradients(config, params, wanted, dy, operands)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # which knows no second derivatives
        found = _Gradients.apply(dy, config, params, tuple(wanted), *operands)
    else:
        found = _call_backward(config, params, wanted, dy, operands)
    return [gradient if each else None for gradient, each in zip(found, wanted, strict=True)]


def _batched_gradients(
    config: Config, params: tuple[float, ...], wanted: list[bool], dy: Tensor, operands: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """The same for a batch of ``dy``, which operators do not know."""
    if config.record.by_formula:
        found = _formula_gradients(config, params, dy, *operands)
        return [gradient if each else None for gradient, each in zip(found, wanted, strict=True)]
    slopes, found = configured(config.record.gradients, False, "input", False), []
    ones = torch.ones_like(operands[0])
    for g, place in enumerate(config.places):
        if not wanted[g]:
            found.append(None)
            continue
        slope = call(slopes.forward_op, *_with_dy(config.record, ones, operands), *params, float(g))
        found.append(by_slope(dy, slope).sum_to_size(operands[place].shape).to(operands[place].dtype))
    return found


def _with_dy(record: Activation, dy: Any, operands: tuple) -> tuple:
    """What :attr:`Activation.gradients` takes: ``dy`` is the last of the elements."""
    count = record.layout.elements
    return (*operands[:count], dy, *operands[count:])


def _second(
    config: Config,
    params: tuple[float, ...],
    wanted: tuple[bool, ...],
    incoming: tuple[Tensor, ...],
    needs: list[bool],
    dy: Tensor,
    operands: tuple[Tensor, ...],
) -> list[Tensor | None]:
    """What flows back through :func:`gradients`: to ``dy`` and to the operands, where ``needs`` says so."""
    record, places = config.record, [place for place, each in zip(config.places, wanted, strict=True) if each]
    incoming = tuple([gradient for gradient, each in zip(incoming, wanted, strict=True) if each])
    if record.by_formula:
        count = len(record.layout.tensors)
        chosen = config._replace(places=tuple(places))
        seed = operands[count:]
        _, vjp = torch.func.vjp(lambda *t: _formula_gradients(chosen, params, *t, *seed), dy, *operands[:count])
        return [*vjp(incoming), *[None] * (len(operands) - count)]
    further = configured(record.gradients, False, "input", False)
    tensors, needed = _with_dy(record, dy, operands), _with_dy(record, needs[0], tuple(needs[1:]))
    total: list[Tensor | None] = [None] * len(tensors)
    for gradient, place in zip(incoming, places, strict=True):
        values = (*params, float(config.places.index(place)))
        asked = [needed[at] for at in further.places]
        found = gradients(further, values, gradient.to(dy.dtype).expand(dy.shape), tensors, asked)
        for at, each in zip(further.places, found, strict=True):
            if each is not None:
                total[at] = each if total[at] is None else total[at] + each
    count = record.layout.elements
    return [total[count], *total[:count], *total[count + 1 :]]


def _formula_gradients(config: Config, params: tuple[float, ...], dy: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    """The gradients of several operands, in PyTorch, with the random numbers that the seed after the tensors gave forward."""
    _check_formula(config.record)
    count = len(config.record.layout.tensors)
    tensors, drawn = operands[:count], {"keep": _keep(operands[0], operands[count])} if len(operands) > count else {}

    def function(*learned: Tensor) -> Tensor:
        given = dict(zip(config.places, learned, strict=True))
        return config.record.reference(*[given.get(place, t) for place, t in enumerate(tensors)], *params, **drawn)

    return torch.func.vjp(function, *[tensors[place] for place in config.places])[1](dy)


def _keep(like: Tensor, seed: Tensor) -> Callable[[int, float], Tensor]:
    """What dropout multiplied by, by the stream of its numbers and its probability."""
    from .fusing.drop import kept  # not at the top: it is made of activations too

    return lambda stream, p: kept(like, seed, stream, p)


def run_operator(record: Activation, *arguments: Any) -> Tensor:
    """The operator of forward, with nothing recorded: for what gives no gradient."""
    with torch.no_grad():
        return call(configured(record, False, "input", False).forward_op, *arguments)


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
    """Applies an activation that takes more than ``x`` and numbers; ``given`` are its tensors by name.

    Raises:
        TypeError, ValueError: as :func:`run`, and :meth:`Activation.fitted`.
    """
    if any([is_stand_in(value) for value in given.values()]):
        return called_later(record, given, params, inplace, save, fast_math, training)
    tensors = record.fitted(given)
    params = record.check(params, inplace, save, fast_math)
    if record.in_eval is not None and not training:
        record, params = record.in_eval(*params)
        return run_fitted(record, tensors, params, inplace, None, fast_math)
    if record.spans is not None:
        record.check_span(params, tensors[0].dtype)
    return run_fitted(record, tensors, params, inplace, save, fast_math, seed)


def called_later(
    record: Activation,
    given: dict[str, Any],
    params: tuple,
    inplace: bool,
    save: str | None,
    fast_math: bool,
    training: bool,
    **beside: Any,
) -> Any:
    """A call to be made once there are tensors, where some of ``given`` or ``beside`` stand for them, as torch.fx has it."""
    options = {name: value for (name, _), value in zip(record.params, params, strict=True)}
    options |= ({"training": training} if record.in_eval else {}) | ({"inplace": inplace} if record.inplace else {})
    stand_ins = tuple(value for value in (*given.values(), *beside.values()) if is_stand_in(value))
    return handle_torch_function(record.function, stand_ins, **given, **options, **beside, save=save, fast_math=fast_math)


def run(x: Tensor, record: Activation, params: tuple, inplace: bool, save: str | None, fast_math: bool) -> Tensor:
    """Applies an activation to one tensor.

    Raises:
        TypeError: ``x`` is not a dense tensor of one of :data:`DTYPES`, or an option is of another type than it has to be.
        ValueError: an option has no such value.
        RuntimeError: in place on a leaf that requires a gradient, or on an inference tensor outside of inference mode.
    """
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.layout is not torch.strided or x.is_nested:
        return _stood_in_for(x, record, params, inplace, save, fast_math)
    return run_fitted(record, (x,), record.check(params, inplace, save, fast_math), inplace, save, fast_math)


def run_fitted(
    record: Activation,
    tensors: tuple[Tensor, ...],
    params: tuple,
    inplace: bool,
    save: str | None,
    fast_math: bool,
    seed: Tensor | None = None,
) -> Tensor:
    """Applies an activation to what has been checked."""
    x, others = tensors[0], tensors[1:]
    compiling, transformed = torch.compiler.is_compiling(), is_transformed()
    laid = layout(record.token)  # of which torch.compile of torch 2.11 reads fields, and unpacks nothing
    draws, places, passed = laid.draws, laid.places, laid.passed
    records = transformed or (torch.is_grad_enabled() and any([tensors[place].requires_grad for place in (*places, *passed)]))
    name, version, *saves = traced(record.token, fast_math).split(",") if compiling else ("", "")
    asked, dissolves = save, bool(saves) and (save is None or save in saves)
    if inplace and save is None and len(places) == 1:
        save = record.default_save(params)
        asked = save if save in saves else None
    save = _first_save(record, tensors, save)
    if inplace:
        if records and x.is_leaf and x.requires_grad and not transformed:
            raise RuntimeError(f"{record.name}: a leaf that requires a gradient cannot be changed in place")
        if transformed or compiling or x.is_neg() or (records and x._is_view()):
            # What is kept must outlive the change.
            before = _copied(x, record) if transformed or dissolves or (records and save == "input") else x
            if compiling and records and BEFORE_2_13 and before is x:
                before = x.neg().neg()  # which is never taken for x itself, as clone is; that torch keeps the input in any case
            return write(x, run_fitted(record, (before, *others), params, False, asked if dissolves else save, fast_math, seed))
    if transformed and (compiling or others or draws or _functionalized()):
        return _formula(record, tensors, params)
    operands = (*others, _seed(x) if seed is None else seed) if draws else others
    if compiling and is_exporting():
        return getattr(torch.ops.jitact, name)(x, *operands, *params)
    if dissolves:
        return getattr(torch.ops.jitact, name)(x, *operands, *params, save=asked or "", version=version)
    if transformed or not records:
        save = "input"  # all that a transform keeps, as it hides the order of memory; with nothing recorded, nothing is kept
    config = configured(record, inplace, save, fast_math)
    if transformed:
        return _ActivateTransformed.apply(x, config, params)
    if records:
        if compiling:  # torch.compile takes no tensor twice
            operands = _each_once(x, operands)
        before = (_copied(x, record),) if inplace and save == "input" else ()
        return _Activate.apply(x, config, params, before, *operands)
    if inplace:
        return overwritten(x, config.forward_op, *operands, *params)
    return call(config.forward_op, x, *operands, *params)


def _each_once(x: Tensor, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``operands``, with views of those that are there before."""
    seen, found = [x], []
    for each in operands:
        found.append(each.view_as(each) if any([each is other for other in seen]) else each)
        seen.append(each)
    return tuple(found)


def _first_save(record: Activation, tensors: tuple[Tensor, ...], save: str | None) -> str:
    """What backward keeps: what is asked for, else the first that gives all gradients that are wanted.

    Raises:
        ValueError: what is asked for does not give them.
    """
    wanted = [place for place in layout(record.token).places[1:] if tensors[place].requires_grad]
    if not wanted or not torch.is_grad_enabled() or save == "input":
        return save or record.saves[0]
    if save is not None:
        name = layout(record.token).tensors[wanted[0]]
        raise ValueError(f"{record.name}: save={save!r} is not enough for the gradient of {name}, which needs save='input'")
    return "input"


def _seed(x: Tensor) -> Tensor:
    """From PyTorch's generator, on ``x``'s device: no synchronisation, and a CUDA graph draws anew with each replay."""
    return torch.randint(2**63 - 1, (1,), device=x.device)


def is_exporting() -> bool:
    """Whether torch.export is at work; torch.compiler's own says so inside every torch.compile of torch 2.11."""
    return torch.compiler.is_exporting()


is_exporting._dynamo_marked_constant = True  # asked while tracing, not traced


def is_transformed() -> bool:
    """Whether torch.func transforms or forward-mode AD are at work. Neither has a public query."""
    return _in_torch_func() or forward_ad._current_level >= 0


def _in_torch_func() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


_in_torch_func._dynamo_marked_constant = True  # as above; while tracing, a transform is at work where the traced code is in one


def _functionalized() -> bool:
    """Whether one of the transforms is torch.func.functionalize, for which an autograd function can have no rule."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() == torch._C._functorch.TransformType.Functionalize for interpreter in stack)


def _formula(record: Activation, tensors: tuple[Tensor, ...], params: tuple[float, ...]) -> Tensor:
    """The activation in PyTorch, for transforms that can do nothing with our operators.

    Raises:
        RuntimeError: there is none; torch.compile answers that by running the call uncompiled, unless fullgraph=True.
    """
    _check_formula(record)
    if len(tensors) == 1:
        _evaluated(record.token)
    return record.reference(*tensors, *params)


def _check_formula(record: Activation) -> None:
    if not record.has_reference:
        _refuse_formula(record.name)


def _refuse_formula(name: str) -> None:
    """Says that a transform needs a formula that there is not."""
    raise RuntimeError(
        f"{name}: transforms inside torch.compile, of exported programs, and torch.func.functionalize need its formula in "
        "PyTorch, which a kernel file does not give; define it with reference="
    )


if BEFORE_2_13:  # where a transform that is run uncompiled, which is how torch.compile answers, may lose derivatives
    _refuse_formula._dynamo_marked_constant = True


def _evaluated(token: str) -> bool:
    """Evaluates a formula once, which may make what it keeps for later calls in ways that torch.compile does not trace."""
    record = by_token[token]
    record.reference(torch.empty(0), *[default for _, default in record.params])
    return True


_evaluated._dynamo_marked_constant = True


def _stood_in_for(x: Any, record: Activation, params: tuple, inplace: bool, save: str | None, fast_math: bool) -> Any:
    """What a call gives for something that is no tensor that kernels take: a call to be made later, or TypeError."""
    if not is_stand_in(x):
        check_tensor(record, x)
    options = {name: value for (name, _), value in zip(record.params, params, strict=True)}
    options |= {"inplace": True} if inplace else {}
    return handle_torch_function(record.function, (x,), x, **options, save=save, fast_math=fast_math)
