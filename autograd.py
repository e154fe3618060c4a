"""The autograd functions around the operators: gradients, second derivatives and transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .configs import BEFORE_2_13, Config, call, configured, in_order, is_batched, is_transformed, strides_of_bits
from .fusing.drop import kept
from .records import Activation, by_token

__all__ = ["activate", "activate_at_once", "activate_transformed", "check_formula", "formula_from_seed", "gradients"]


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
        elif config.draws:
            ctx.strides = _strides_of_draws(config, x)
        if config.inplace:
            y = x
            ctx.mark_dirty(x)
        saved = (y if config.save == "output" else kept, *others)
        if config.save != "input":
            saved = (saved[0], *saved[config.elements :])
        elif config.reads:
            saved = _what_is_read(ctx, config, saved)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.params = config, params
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        config = ctx.config
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if dy is None:
            return tuple(found)
        for place in config.passed:
            found[_argument(place)] = dy
        needs = ctx.needs_input_grad
        wanted = [needs[_argument(place)] and place not in config.passed for place in config.places]
        if not any(wanted):
            return tuple(found)
        has_gaps = config.reads and config.save == "input" and ctx.unread
        kept, *others = _with_stand_ins(ctx, dy) if has_gaps else ctx.saved_tensors
        if config.draws and config.save != "bit":
            kept = _as_drawn(kept, ctx.strides)
        if config.by_bits or (config.save == "input" and others):
            slopes = _wanted_gradients(ctx, dy, kept, others, wanted)
            for place, gradient in zip(config.places, slopes, strict=True):
                if gradient is not None:
                    found[_argument(place)] = gradient
        else:
            found[0] = _gradient(ctx, dy, kept, others)
        return tuple(found)


def _strides_of_draws(config: Config, x: Tensor) -> tuple[int, ...] | None:
    """The order of memory in which elements draw random numbers; None where they draw none, or a graph keeps it itself."""
    return strides_of_bits(x) if config.draws and not torch.compiler.is_compiling() else None


def _as_drawn(kept: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """What was kept, in that order, which hooks for saved tensors may have changed."""
    if strides is None or strides_of_bits(kept) == strides:
        return kept
    return torch.empty_strided(kept.shape, strides, dtype=kept.dtype, device=kept.device).copy_(kept)


def _what_is_read(ctx: Any, config: Config, tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Of the tensors of a call, those that backward reads, and None in the places of the others, as ``ctx`` then tells.

    What is not kept may be changed in place, or freed, before backward.
    """
    ctx.unread = unread = _unread(config, ctx.needs_input_grad)
    if unread is None:
        return ()
    if not unread:
        return tensors
    if unread[-1] >= config.elements:
        ctx.shapes = [(tensors[place].shape, tensors[place].dtype) for place in unread if place >= config.elements]
    if unread[0] == 0:
        ctx.strides = strides_of_bits(tensors[0])
    return tuple([None if place in unread else each for place, each in enumerate(tensors)])


def _unread(config: Config, needs: tuple[bool, ...]) -> tuple[int, ...] | None:
    """Which tensors are read by no gradient that is computed, where autograd needs these; None where none is computed."""
    compiling = torch.compiler.is_compiling()
    if not compiling and needs in config.unread:
        return config.unread[needs]
    read = [config.reads[place] for place in config.places if place not in config.passed and needs[_argument(place)]]
    unread = tuple([place for place in range(len(config.reads)) if not any([each >> place & 1 for each in read])])
    found = unread if read else None
    if not compiling:
        config.unread[needs] = found
    return found


def _with_stand_ins(ctx: Any, dy: Tensor) -> list[Tensor]:
    """What backward's operator takes: what was kept and, where it reads nothing, tensors of the same shape.

    Elements lie in memory as the first operand did, whose order is that of gradients and of random numbers.
    """
    found, elements = list(ctx.saved_tensors), ctx.config.elements
    for place in ctx.unread:
        if place < elements:
            found[place] = found[0] if place else _stand_in(dy, ctx.strides)
    broadcast = [place for place in ctx.unread if place >= elements]
    if broadcast:
        make = dy.new_zeros if is_batched(dy) else dy.new_empty
        for place, (shape, dtype) in zip(broadcast, ctx.shapes, strict=True):
            found[place] = make(shape, dtype=dtype)
    return found


def _stand_in(dy: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tensor like ``dy`` with these strides, of which nothing is read: that itself, if it has them."""
    batched = is_batched(dy)
    if not batched and dy.stride() == strides and (torch.compiler.is_compiling() or not dy._is_zerotensor()):
        return dy.detach() if torch.is_grad_enabled() else dy
    like = torch.empty_strided(dy.shape, strides, dtype=dy.dtype, device=dy.device)
    return like.zero_() if batched else like  # formulas may compute something of it


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


# Not functions around these: torch.compile, where it runs a call uncompiled, would compile such a function alone, and a graph
# knows no forward mode.
activate, activate_transformed = _Activate.apply, _ActivateTransformed.apply

# The same where neither torch.compile nor transforms are at work: what Function.apply calls when it has found that out, in
# almost half of the time.
activate_at_once = super(torch.autograd.Function, _Activate).apply


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
        dy = in_order(dy, config, ctx.strides)
    if others and config.save == "output" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        further = configured(config.record.from_output, False, "input", False)
        return activate(kept, further, params, (), dy, *others)
    if others or (not torch.is_grad_enabled() and not is_transformed()):
        return call(config.backward_op, dy, kept, *others, *params)
    return (_GradientCompiled if torch.compiler.is_compiling() else _Gradient).apply(dy, kept, config, params)


def _slope(
    config: Config, dy: Tensor, strides: tuple[int, ...], mask: Tensor, others: list[Tensor], params: tuple[float, ...]
) -> Tensor:
    """The slope at each element: in float32 at least, where it does not hang on random numbers, which differ by dtype."""
    dtype, others = _widened(config, dy, others)
    ones = torch.empty_strided(dy.shape, strides, dtype=dtype, device=dy.device).fill_(1)
    return call(config.backward_op, ones, mask, *others, *params)


def _widened(config: Config, dy: Tensor, others: list[Tensor]) -> tuple[torch.dtype, list[Tensor]]:
    """What slopes are computed in, and the operands beside the elements for that."""
    if config.draws:
        return dy.dtype, others
    dtype = torch.promote_types(dy.dtype, torch.float32)
    return dtype, [t.to(dtype) for t in others]


def _wanted_gradients(
    ctx: Any, dy: Tensor, kept: Tensor, others: list[Tensor], wanted: list[bool]
) -> list[Tensor | None]:
    """The gradients of several operands, from what was kept."""
    config, params = ctx.config, ctx.params
    if config.save == "bit":
        if is_batched(dy) or (torch.is_grad_enabled() and not torch.compiler.is_compiling()):
            return _gradients_from_numbers(ctx, dy, kept, others, wanted)
        found = _call_backward(config, params, tuple(wanted), in_order(dy, config, ctx.strides), (kept, *others))
        return [gradient if each else None for gradient, each in zip(found, wanted, strict=True)]
    return gradients(config, params, dy, (kept, *others), wanted)


def _gradients_from_numbers(
    ctx: Any, dy: Tensor, mask: Tensor, others: list[Tensor], wanted: list[bool]
) -> list[Tensor | None]:
    """The same from bits, for a batch of ``dy`` or for second derivatives: the bits as numbers, and sums by PyTorch."""
    config = ctx.config
    dtype, given = _widened(config, dy, others)
    further, bits = configured(config.record.from_bit, False, "input", False), _as_numbers(mask, dy.shape, ctx.strides, dtype)
    found: list[Tensor | None] = []
    for g, place in enumerate(config.places):
        if not wanted[g]:
            found.append(None)
            continue
        values, like = (*ctx.params, float(g)), others[place - config.elements] if place else dy
        if is_batched(dy):
            gradient = by_slope(dy.to(dtype), call(further.forward_op, bits, torch.ones_like(bits), *given, *values))
        else:
            gradient = activate(bits, further, values, (), dy.to(dtype), *given)
        found.append(gradient.sum_to_size(like.shape).to(like.dtype))
    return found


def _as_numbers(mask: Tensor, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bits of a mask as ones and zeros, in the order of memory that they are in."""
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    return bits.view(-1)[: shape.numel()].to(dtype).as_strided(shape, strides)


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
        ctx.strides = _strides_of_draws(config, operands[0])
        return _call_backward(config, params, wanted, dy, operands)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        config, (dy, kept, *others) = ctx.config, ctx.saved_tensors
        operands = (_as_drawn(kept, ctx.strides), *others)
        needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]]
        ddy, *found = _second(config, ctx.params, ctx.wanted, gradients, needs, dy, operands)
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
    check_formula(config.record)
    count = len(config.record.layout.tensors)
    tensors, drawn = operands[:count], {"keep": _keep(operands[0], operands[count])} if len(operands) > count else {}

    def function(*learned: Tensor) -> Tensor:
        given = dict(zip(config.places, learned, strict=True))
        return config.record.reference(*[given.get(place, t) for place, t in enumerate(tensors)], *params, **drawn)

    return torch.func.vjp(function, *[tensors[place] for place in config.places])[1](dy)


def _keep(like: Tensor, seed: Tensor) -> Callable[[int, float], Tensor]:
    """What dropout multiplied by, by the stream of its numbers and its probability."""
    return lambda stream, p: kept(like, seed, stream, p)


def formula_from_seed(
    record: Activation, tensors: tuple[Tensor, ...], params: tuple[float, ...], seed: Tensor
) -> Tensor:
    """The activation in PyTorch, with the random numbers that a kernel draws from a seed.

    Raises:
        RuntimeError: its formula draws numbers of its own.
    """
    if not _by_formula(record.token):
        raise RuntimeError(f"{record.name}: seed= is not possible within transforms, where its formula draws its own numbers")
    # Of a batch, each tensor gets what it would get alone, so the numbers are drawn for none of them.
    alone = torch.empty_strided(tensors[0].shape, tensors[0].stride(), dtype=tensors[0].dtype, device="meta")
    like = torch.empty_like(alone, device=tensors[0].device)
    return record.reference(*tensors, *params, keep=_keep(like, seed))


def _by_formula(token: str) -> bool:
    return by_token[token].by_formula


_by_formula._dynamo_marked_constant = True  # torch.compile looks no further inside


def check_formula(record: Activation) -> None:
    """Whether there is the activation's formula in PyTorch.

    Raises:
        RuntimeError: there is none; torch.compile answers that by running the call uncompiled, unless fullgraph=True.
    """
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
