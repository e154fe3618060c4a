"""Autograd functions for the operators: gradients, second derivatives, and torch.func transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .configs import (
    BEFORE_2_13,
    Config,
    call,
    call_forward,
    configured,
    in_order,
    is_batched,
    is_transformed,
    records_backward,
    strides_of_bits,
)
from .fusing.drop import kept
from .records import Activation, by_token
from .records.dtypes import wider
from .records.tracing import as_constant

__all__ = ["activate", "activate_at_once", "activate_transformed", "check_formula", "formula_from_seed", "gradients"]


def by_slope(dy: Tensor, slope: Tensor) -> Tensor:
    """``dy * slope`` in ``dy``'s dtype, 0 where the slope is 0. By PyTorch, whose operations support vmap and forward AD."""
    return torch.where(slope == 0, slope, dy * slope).to(dy.dtype)


class _Activate(torch.autograd.Function):
    """Forward, saving for backward what ``config.save`` names, and the other operands.

    It has no setup_context, because with one PyTorch inspects the signature of forward in every call, which takes longer than
    all the rest; and no jvp, because torch.compile accepts no Function that defines one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, config: Config, params: tuple[float, ...], before: tuple[Tensor, ...] = (), *others: Tensor
    ) -> Tensor:
        """``before`` holds a copy of ``x``, if that is both changed in place and saved.

        The copy is made by the caller, so that it has a history for second derivatives, and passed in a tuple, where autograd
        does not see it: compiled autograd would not accept an input without a gradient.
        """
        y = call_forward(config, x, *others, *params)
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
            saved = _tensors_to_save(ctx, config, saved)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.params = config, params
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        config, needs = ctx.config, ctx.needs_input_grad
        found: list[Tensor | None] = [None] * len(needs)
        if dy is None:
            return tuple(found)
        if len(needs) <= _argument(1) and not config.passed and not config.reads and not config.draws:  # of x alone
            found[0] = _gradient(ctx, dy, ctx.saved_tensors[0])
            return tuple(found)
        for place in config.passed:
            found[_argument(place)] = dy
        wanted = [needs[_argument(place)] and place not in config.passed for place in config.places]
        if not any(wanted):
            return tuple(found)
        has_gaps = config.reads and config.save == "input" and ctx.unread
        kept, *others = _with_placeholders(ctx, dy) if has_gaps else ctx.saved_tensors
        if config.draws and config.save != "bit":
            kept = _with_strides_of_draws(kept, ctx.strides)
        if config.by_bits or (config.save == "input" and others):
            slopes = _wanted_gradients(ctx, dy, kept, others, wanted)
            for place, gradient in zip(config.places, slopes, strict=True):
                if gradient is not None:
                    found[_argument(place)] = gradient
        else:
            found[0] = _gradient(ctx, dy, kept, others)
        return tuple(found)


def _strides_of_draws(config: Config, x: Tensor) -> tuple[int, ...] | None:
    """The strides of the order in which elements draw random numbers; None without any, or in a graph, which fixes strides."""
    return strides_of_bits(x) if config.draws and not torch.compiler.is_compiling() else None


def _with_strides_of_draws(kept: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """The saved tensor, copied to these strides if hooks for saved tensors have changed them."""
    if strides is None or strides_of_bits(kept) == strides:
        return kept
    return torch.empty_strided(kept.shape, strides, dtype=kept.dtype, device=kept.device).copy_(kept)


def _tensors_to_save(ctx: Any, config: Config, tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The tensors to save, with None for those that backward does not read. Stores the others' shapes and strides in ``ctx``.

    A tensor that is not saved may be changed in place, or freed, before backward.
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
    """The tensors that no gradient to be computed reads, given ``needs_input_grad``; None if no gradient is computed."""
    compiling = torch.compiler.is_compiling()
    if not compiling and needs in config.unread:
        return config.unread[needs]
    read = [config.reads[place] for place in config.places if place not in config.passed and needs[_argument(place)]]
    unread = tuple([place for place in range(len(config.reads)) if not any([each >> place & 1 for each in read])])
    found = unread if read else None
    if not compiling:
        config.unread[needs] = found
    return found


def _with_placeholders(ctx: Any, dy: Tensor) -> list[Tensor]:
    """The operands of backward's operator: the saved tensors, with tensors of the right shape for those that it does not read.

    Elementwise ones have the strides of the first operand, as gradients and random numbers do.
    """
    found, elements = list(ctx.saved_tensors), ctx.config.elements
    for place in ctx.unread:
        if place < elements:
            found[place] = found[0] if place else _placeholder(dy, ctx.strides)
    broadcast = [place for place in ctx.unread if place >= elements]
    if broadcast:
        make = dy.new_zeros if is_batched(dy) else dy.new_empty
        for place, (shape, dtype) in zip(broadcast, ctx.shapes, strict=True):
            found[place] = make(shape, dtype=dtype)
    return found


def _placeholder(dy: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tensor like ``dy`` with these strides, whose values are not read: ``dy`` itself, if it has them."""
    batched = is_batched(dy)
    if not batched and dy.stride() == strides and (torch.compiler.is_compiling() or not dy._is_zerotensor()):
        return dy.detach() if torch.is_grad_enabled() else dy
    like = torch.empty_strided(dy.shape, strides, dtype=dy.dtype, device=dy.device)
    return like.zero_() if batched else like  # zeros: formulas may compute with them


def _argument(place: int) -> int:
    """The index of an operand among the arguments of :meth:`_Activate.forward`."""
    return place + 3 if place else 0


class _ActivateTransformed(_Activate):
    """Forward within torch.func transforms and forward-mode AD: never in place, saving the input."""

    @staticmethod
    def forward(x: Tensor, config: Config, params: tuple[float, ...]) -> Tensor:
        return call_forward(config, x, *params)

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


# Not wrapped in functions: where torch.compile runs a call uncompiled, it would compile such a function by itself, and graphs
# do not support forward-mode AD.
activate, activate_transformed = _Activate.apply, _ActivateTransformed.apply

# For calls outside of torch.compile and transforms: the C++ method that Function.apply ends up calling there. It takes almost
# half of the time.
activate_at_once = super(torch.autograd.Function, _Activate).apply


class _Gradient(torch.autograd.Function):
    """Backward as a differentiable function of ``dy`` and the saved tensor."""

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
        kept, by_kept = ctx.saved_tensors[1], None
        if ctx.needs_input_grad[1]:
            curvature = _curvature(ctx)
            by_kept = torch.zeros_like(kept) if curvature is None else ddx * curvature
        return _gradient(ctx, ddx, kept), by_kept, None, None

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
    """``dy`` times the slope: of an elementwise function both the vector-Jacobian and the Jacobian-vector product."""
    config, params = ctx.config, ctx.params
    if config.save == "bit":
        if others and (is_batched(dy) or records_backward()):
            return _FromBits.apply(dy, config, params, (True,), ctx.strides, kept, *others)[0]
        if is_batched(dy):
            return by_slope(dy, _slope(config, dy, ctx.strides, kept, params))
        dy = in_order(dy, config, ctx.strides)
    if others and config.save == "output" and records_backward():
        further = configured(config.record.from_output, False, "input", False)
        return activate(kept, further, params, (), dy, *others)
    if others or (not torch.is_grad_enabled() and not is_transformed()):
        return call(config.backward_op, dy, kept, *others, *params)
    return (_GradientCompiled if torch.compiler.is_compiling() else _Gradient).apply(dy, kept, config, params)


def _slope(config: Config, dy: Tensor, strides: tuple[int, ...], mask: Tensor, params: tuple[float, ...]) -> Tensor:
    """Slopes from the bit mask, at least in float32."""
    dtype = wider(dy.dtype)
    ones = torch.empty_strided(dy.shape, strides, dtype=dtype, device=dy.device).fill_(1)
    return call(config.backward_op, ones, mask, *params)


def _wanted_gradients(
    ctx: Any, dy: Tensor, kept: Tensor, others: list[Tensor], wanted: list[bool]
) -> list[Tensor | None]:
    """The gradients of several operands, from the saved tensors; None where they are not wanted."""
    config, params = ctx.config, ctx.params
    if config.save == "bit":
        of_bits = _FromBits.apply if is_batched(dy) or records_backward() else _FromBits.forward
        return _wanted(of_bits(dy, config, params, tuple(wanted), ctx.strides, kept, *others), wanted)
    return gradients(config, params, dy, (kept, *others), wanted)


def _wanted(found: Sequence[Tensor], wanted: list[bool]) -> list[Tensor | None]:
    """The gradients, with None for those that are not wanted."""
    return [gradient if each else None for gradient, each in zip(found, wanted, strict=True)]


class _FromBits(torch.autograd.Function):
    """The gradients of several operands from saved bits, as differentiable functions of ``dy`` and the other operands."""

    @staticmethod
    def forward(
        dy: Tensor,
        config: Config,
        params: tuple[float, ...],
        wanted: tuple[bool, ...],
        strides: tuple[int, ...],
        mask: Tensor,
        *others: Tensor,
    ) -> tuple[Tensor, ...]:
        return _call_backward(config, params, wanted, in_order(dy, config, strides), (mask, *others))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        dy, ctx.config, ctx.params, ctx.wanted, ctx.strides, *kept = inputs
        ctx.save_for_backward(dy, *kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple:
        config, (dy, mask, *others) = ctx.config, ctx.saved_tensors
        if len(config.places) == 1:  # proportional to dy
            arguments = config, ctx.params, ctx.wanted, ctx.strides, mask, *others
            ddy = None if incoming[0] is None else _FromBits.apply(incoming[0], *arguments)[0]
            return ddy, *[None] * len(arguments)
        # Random numbers depend on the dtype.
        dtype = dy.dtype if config.draws else wider(dy.dtype)
        given = others if config.draws else [t.to(dtype) for t in others]
        tensors = (_unpacked(mask, dy.shape, ctx.strides, dtype), dy.to(dtype), *given)
        further = configured(config.record.from_bit, False, "input", False)
        needs = (False, ctx.needs_input_grad[0], *ctx.needs_input_grad[6:])
        of_each = {g: t.to(dtype) for g, t in enumerate(incoming) if t is not None and ctx.wanted[g]}
        total = _added_up(further, ctx.params, of_each, dy.shape, tensors, needs)
        like = (dy, *others)
        ddy, *found = [each if each is None else each.to(t.dtype) for each, t in zip(total[1:], like, strict=True)]
        return ddy, None, None, None, None, None, *found

    @staticmethod
    def vmap(info: Any, in_dims: tuple, dy: Tensor, *arguments: Any) -> tuple:
        """One call for each of the batch, as operators want a tensor's strides; what was saved before is not batched."""
        each = [_FromBits.apply(dy.select(in_dims[0], i), *arguments) for i in range(info.batch_size)]
        return tuple([torch.stack(of) for of in zip(*each, strict=True)]), (0,) * len(each[0])


def _unpacked(mask: Tensor, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bits of a mask as a tensor of ones and zeros, with the strides of the order in which the mask holds them."""
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    return bits.view(-1)[: shape.numel()].to(dtype).as_strided(shape, strides)


def _curvature(ctx: Any) -> Tensor | None:
    """``dy`` times the derivative of the slope by the saved tensor, from the reference; None if that is 0 almost everywhere."""
    (dy, kept), config = ctx.saved_tensors, ctx.config
    if "bit" in config.record.saves:
        return None
    reference = config.record.gradient_reference
    _, vjp = torch.func.vjp(lambda k: reference(dy, k, ctx.params, config.save), kept)
    return vjp(torch.ones_like(dy))[0]


class _Gradients(torch.autograd.Function):
    """The gradients of several operands as differentiable functions of ``dy`` and the operands."""

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
        operands = (_with_strides_of_draws(kept, ctx.strides), *others)
        needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]]
        ddy, *found = _double_backward(config, ctx.params, ctx.wanted, gradients, needs, dy, operands)
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
    """The gradients of several operands, the last of which may be the seed; None for those that are not wanted."""
    if is_batched(dy):
        return _batched_gradients(config, params, wanted, dy, operands)
    if records_backward():
        found = _Gradients.apply(dy, config, params, tuple(wanted), *operands)
    else:
        found = _call_backward(config, params, wanted, dy, operands)
    return _wanted(found, wanted)


def _batched_gradients(
    config: Config, params: tuple[float, ...], wanted: list[bool], dy: Tensor, operands: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """The same for a batched ``dy``, which the operators do not support."""
    if config.record.by_formula:
        found = _formula_gradients(config, params, dy, *operands)
        return _wanted(found, wanted)
    slopes, found = configured(config.record.gradients, False, "input", False), []
    ones = torch.ones_like(operands[0])
    for g, place in enumerate(config.places):
        if not wanted[g]:
            found.append(None)
            continue
        slope = call_forward(slopes, *_operands_with_dy(config.record, ones, operands), *params, float(g))
        found.append(by_slope(dy, slope).sum_to_size(operands[place].shape).to(operands[place].dtype))
    return found


def _operands_with_dy(record: Activation, dy: Any, operands: tuple) -> tuple:
    """The operands of :attr:`Activation.gradients`: ``dy`` comes last among the elementwise ones."""
    count = record.layout.elements
    return (*operands[:count], dy, *operands[count:])


def _double_backward(
    config: Config,
    params: tuple[float, ...],
    wanted: tuple[bool, ...],
    incoming: tuple[Tensor, ...],
    needs: list[bool],
    dy: Tensor,
    operands: tuple[Tensor, ...],
) -> list[Tensor | None]:
    """Backward of :func:`gradients`: the gradients of ``dy`` and of the operands, where ``needs`` is True."""
    record, places = config.record, [place for place, each in zip(config.places, wanted, strict=True) if each]
    incoming = tuple([gradient for gradient, each in zip(incoming, wanted, strict=True) if each])
    if record.by_formula:
        count = len(record.layout.tensors)
        chosen = config._replace(places=tuple(places))
        seed = operands[count:]
        _, vjp = torch.func.vjp(lambda *t: _formula_gradients(chosen, params, *t, *seed), dy, *operands[:count])
        return [*vjp(incoming), *[None] * (len(operands) - count)]
    further = configured(record.gradients, False, "input", False)
    tensors, needed = _operands_with_dy(record, dy, operands), _operands_with_dy(record, needs[0], tuple(needs[1:]))
    of_each = {config.places.index(place): t.to(dy.dtype) for place, t in zip(places, incoming, strict=True)}
    total, count = _added_up(further, params, of_each, dy.shape, tensors, needed), record.layout.elements
    return [total[count], *total[:count], *total[count + 1 :]]


def _added_up(
    further: Config,
    params: tuple[float, ...],
    incoming: dict[int, Tensor],
    shape: torch.Size,
    tensors: tuple[Tensor, ...],
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """The gradients of ``tensors`` where ``needs`` is True, given that of each result of ``further``, by its number."""
    total: list[Tensor | None] = [None] * len(tensors)
    for g, gradient in incoming.items():
        found = gradients(further, (*params, float(g)), gradient.expand(shape), tensors, [needs[at] for at in further.places])
        for place, each in zip(further.places, found, strict=True):
            if each is not None:
                total[place] = each if total[place] is None else total[place] + each
    return total


def _formula_gradients(config: Config, params: tuple[float, ...], dy: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    """The gradients of several operands by PyTorch, with forward's random numbers if a seed follows the tensors."""
    check_formula(config.record)
    count = len(config.record.layout.tensors)
    tensors, drawn = operands[:count], {"keep": _keep(operands[0], operands[count])} if len(operands) > count else {}

    def function(*learned: Tensor) -> Tensor:
        given = dict(zip(config.places, learned, strict=True))
        return config.record.reference(*[given.get(place, t) for place, t in enumerate(tensors)], *params, **drawn)

    return torch.func.vjp(function, *[tensors[place] for place in config.places])[1](dy)


def _keep(like: Tensor, seed: Tensor) -> Callable[[int, float], Tensor]:
    """A function of the random stream and the probability: the factors by which dropout multiplied each element."""
    return lambda stream, p: kept(like, seed, stream, p)


def formula_from_seed(
    record: Activation, tensors: tuple[Tensor, ...], params: tuple[float, ...], seed: Tensor
) -> Tensor:
    """The activation by PyTorch, with the random numbers that a kernel draws from a seed.

    Raises:
        RuntimeError: its formula draws its own random numbers.
    """
    if not _by_formula(record.token):
        raise RuntimeError(f"{record.name}: seed= is not possible within transforms, where its formula draws its own numbers")
    # Under vmap each tensor of the batch gets the numbers that it would get alone, so they are drawn for an unbatched tensor.
    alone = torch.empty_strided(tensors[0].shape, tensors[0].stride(), dtype=tensors[0].dtype, device="meta")
    like = torch.empty_like(alone, device=tensors[0].device)
    return record.reference(*tensors, *params, keep=_keep(like, seed))


@as_constant
def _by_formula(token: str) -> bool:
    return by_token[token].by_formula


def check_formula(record: Activation) -> None:
    """Checks that the activation has a formula in PyTorch.

    Raises:
        RuntimeError: it has none; torch.compile then runs the call uncompiled, unless fullgraph=True.
    """
    if not record.has_reference:
        _refuse_formula(record.name)


def _refuse_formula(name: str) -> None:
    """Raises the error of :func:`check_formula`."""
    raise RuntimeError(
        f"{name}: transforms inside torch.compile, of several operands, of exported programs, and functionalize need its "
        "formula in PyTorch, which a kernel file does not give; define it with reference="
    )


if BEFORE_2_13:  # makes torch.compile raise it: there, a transform that it runs uncompiled may lose derivatives
    as_constant(_refuse_formula)
