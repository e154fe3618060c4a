"""Calls for DTensors: each process computes its own shards, of tensors that are sharded alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from ..configs import drawn_seed
from ..records import Activation, layout
from ..records.arguments import check_tensor, is_sharded, what_it_is
from ..records.operands import broadcast_shape, by_channel, by_row, order_in_memory, promoted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

__all__ = ["by_shards"]


def by_shards(
    record: Activation,
    given: dict[str, Any],
    call: Callable[[dict[str, Any], Tensor | None], Tensor],
    *,
    draws: bool,
    seed: Tensor | None = None,
    packed: int | None = None,
    kept: tuple[str, ...] = (),
) -> Tensor:
    """A call for DTensors, whose result is sharded as they are.

    A dimension that any operand shards is sharded in the result, and in each operand that has it. Operands that are not so are
    redistributed first; a partial sum is added up. In a process that is not part of the mesh, the result is empty.

    Args:
        record: of the activation.
        given: the tensors by name; those that are learned or have dimensions are DTensors of one mesh.
        call: the same for the shards of this process by name, and a seed.
        draws: whether the call draws random numbers: each shard other ones, its replicas the same.
        seed: of the caller, the same in all processes; None: a new one.
        packed: the dimension of ``x`` that holds both operands of a gated activation, which is not sharded; None without.
        kept: the names of the tensors that backward reads; "" is the result.

    Raises:
        TypeError: a tensor with dimensions is not a DTensor.
        ValueError: DTensors are of different meshes, or shapes do not match.
    """
    mesh = next(each.device_mesh for each in given.values() if is_sharded(each))
    _check_kinds(record, given, mesh)
    dims = _dims(record, given, packed)
    shards = _shards(mesh, given, dims)
    placements = {name: _placements(dims.of[name], shards) for name, each in given.items() if is_sharded(each)}
    local = {name: _local(each, placements[name], shards) if name in placements else each for name, each in given.items()}
    if mesh.get_coordinate() is None:
        y = _nothing(local)
    else:
        y = call(local, _seed(next(iter(local.values())), mesh, shards, seed) if draws else seed)
    # Of an operand that was redistributed, backward reads a copy.
    read = {name: given.get(name) for name in kept if not name or given[name].placements == placements.get(name)}
    return _whole(record, y, mesh, shards, next(iter(given.values())), dims.shape, read)


class _Dims(NamedTuple):
    """The dimensions of a call's tensors.

    Attributes:
        shape: of the result.
        of: for each tensor by name, the dimensions that it can be sharded along: those of the result, with its own.
    """

    shape: torch.Size
    of: dict[str, dict[int, int]]


def _check_kinds(record: Activation, given: dict[str, Any], mesh: DeviceMesh) -> None:
    """Checks that tensors are DTensors of one mesh. Those of one value may be plain, if they are not learned."""
    spec = layout(record.token)
    for name, each in given.items():
        if not isinstance(each, Tensor) and name not in spec.tensors[: spec.elements]:
            continue  # a number
        check_tensor(record, each, f"{name} must be")
        if not is_sharded(each):
            if each.dim() or each.requires_grad:
                what = f"{name} must be a DTensor beside other DTensors, got {what_it_is(each)}"
                raise TypeError(f"{record.name}: {what}; make it one with torch.distributed.tensor.distribute_tensor")
        elif each.device_mesh != mesh:
            raise ValueError(f"{record.name}: {name} is on another mesh, {each.device_mesh}, not on {mesh}")


def _dims(record: Activation, given: dict[str, Any], packed: int | None) -> _Dims:
    """Which dimensions of the tensors belong together.

    Raises:
        ValueError: shapes do not match.
    """
    spec = layout(record.token)
    if packed is not None:
        x = given["x"]
        shape = torch.Size([size // 2 if dim == packed else size for dim, size in enumerate(x.shape)])
        of = {"x": {dim: dim for dim in range(len(shape)) if dim != packed}}
    else:
        elements = [name for name in given if name in spec.tensors[: spec.elements]]
        shape = broadcast_shape(record, elements, [given[name] for name in elements])
        of = {name: _aligned(given[name].shape, shape) for name in elements}
    x = torch.empty(shape, device="meta")
    before = next(iter(given.values())).dim()
    for name, each in given.items():
        if name in of:
            continue
        of[name] = {}
        if not isinstance(each, Tensor) or (name in record.channels and each.numel() == 1):
            continue
        like = torch.empty(each.shape, device="meta")
        if name in record.channels:
            dim = record.channels[name].dim
            by_channel(record, name, record.channels[name], like, x, before)
            of[name] = {(dim if dim < 0 else dim - before) + len(shape): 0}
        elif name in spec.tensors:
            by_row(record, name, like, x)
            of[name] = {dim: dim for dim in range(len(shape) - 1)}
        of[name] = {dim: own for dim, own in of[name].items() if dim != packed}
    return _Dims(shape, of)


def _aligned(own: torch.Size, shape: torch.Size) -> dict[int, int]:
    """The dimensions of ``shape`` that a tensor which broadcasts to it has, each with the tensor's own."""
    more = len(shape) - len(own)
    return {dim + more: dim for dim, size in enumerate(own) if size == shape[dim + more]}


def _shards(mesh: DeviceMesh, given: dict[str, Any], dims: _Dims) -> tuple[Placement | None, ...]:
    """For each dimension of the mesh how it shards the result: as the first operand that is sharded there; None if none is."""
    found: list[Placement | None] = []
    for place in range(mesh.ndim):
        placed = None
        for name, each in given.items():
            if placed is None and is_sharded(each):
                own = each.placements[place]
                dim = next((dim for dim, at in dims.of[name].items() if at == getattr(own, "dim", None)), None)
                # Pieces that do not lie one after another, as flatten makes them, are kept where all operands have such.
                if dim is not None and (own.is_shard() or _all_have(own, dim, place, given, dims)):
                    placed = _placed(own, dim)
        found.append(placed)
    return tuple(found)


def _all_have(placement: Placement, dim: int, place: int, given: dict[str, Any], dims: _Dims) -> bool:
    """Whether all operands that have a dimension of the result are sharded in one way."""
    having = [(each, dims.of[name][dim]) for name, each in given.items() if is_sharded(each) and dim in dims.of[name]]
    return all([each.placements[place] == _placed(placement, own) for each, own in having])


def _placed(placement: Placement, dim: int) -> Placement:
    """The placement for a dimension of another number."""
    from torch.distributed.tensor import Shard

    return Shard(dim) if placement.is_shard() else type(placement)(dim, split_factor=placement.split_factor)


def _placements(dims: dict[int, int], shards: tuple[Placement | None, ...]) -> tuple[Placement, ...]:
    """Those of an operand that is sharded as the result is."""
    from torch.distributed.tensor import Replicate

    return tuple([_placed(each, dims[each.dim]) if each is not None and each.dim in dims else Replicate() for each in shards])


def _local(given: Tensor, placements: tuple[Placement, ...], shards: tuple[Placement | None, ...]) -> Tensor:
    """The shard that this process computes with; its gradient is a partial sum where the result is sharded and it is not."""
    from torch.distributed.tensor import Partial

    summed = [each is not None and own.is_replicate() for each, own in zip(shards, placements, strict=True)]
    of_gradient = tuple([Partial() if each else own for each, own in zip(summed, placements, strict=True)])
    if given.placements != placements:
        given = given.redistribute(given.device_mesh, placements)
    if torch.compiler.is_compiling():
        return given.to_local(grad_placements=of_gradient)
    return _Local.apply(given, of_gradient)


def _whole(
    record: Activation,
    y: Tensor,
    mesh: DeviceMesh,
    shards: tuple[Placement | None, ...],
    x: Tensor,
    shape: torch.Size,
    read: dict[str, Tensor | None],
) -> Tensor:
    """The DTensor of which ``y`` is this process's shard. ``read`` has the DTensors of which backward reads the shard."""
    from torch.distributed.tensor import Replicate

    if x.shape == shape:
        stride = torch.empty_like(torch.empty_strided(shape, x.stride(), device="meta")).stride()
    else:
        stride = _dense_strides(y if y.dim() == len(shape) else torch.empty(shape, device="meta"), shape)
    given = mesh, tuple([Replicate() if each is None else each for each in shards]), shape, stride
    if torch.compiler.is_compiling():
        return _made(y, *given)
    return _Whole.apply(y, *given, record.name, read)


def _dense_strides(y: Tensor, shape: torch.Size) -> tuple[int, ...]:
    """The strides of dense memory of a shape, with the dimensions in the order in which they lie in ``y``."""
    found, size = [1] * len(shape), 1
    for dim in reversed(order_in_memory(y)):
        found[dim], size = size, size * max(shape[dim], 1)
    return tuple(found)


def _nothing(local: dict[str, Any]) -> Tensor:
    """The shard of a process that is not part of the mesh: no elements, but dtype and history of those of the others."""
    sums = [each.sum() for each in local.values() if isinstance(each, Tensor)]
    # PyTorch's results may be on a CPU there.
    return torch.stack([each.to(sums[0].device, promoted(sums)) for each in sums]).sum().expand(0)


def _made(y: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(y, mesh, placements, run_check=False, shape=shape, stride=stride)


class _Local(Function):
    """This process's shard of a DTensor. The gradient of PyTorch's own has none before 2.13."""

    @staticmethod
    def forward(ctx: FunctionCtx, given: Tensor, of_gradient: tuple[Placement, ...]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.whole = given.device_mesh, of_gradient, given.shape, given.stride()
        local = given.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor | None) -> tuple[Tensor | None, None]:
        return None if dy is None else _Whole.apply(dy, *ctx.whole), None


class _Whole(Function):
    """The inverse. Of a partial sum each part's gradient is that of the sum.

    A shard does not share the count of in-place changes of its DTensor, so that is looked at here.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        y: Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: torch.Size,
        stride: tuple[int, ...],
        name: str = "",
        read: dict[str, Tensor | None] | None = None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.placements, ctx.device = placements, y.device
        whole = _made(y, mesh, placements, shape, stride)
        # By weak references: what nobody else holds is not changed, and backward frees the shards.
        versions = [whole if each is None else each for each in (read or {}).values()]
        ctx.name, ctx.versions = name, [(weakref.ref(each), each._version) for each in versions if not each.is_inference()]
        return whole

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor | None) -> tuple[Tensor | None, None, None, None, None, None, None]:
        from torch.distributed.tensor import Replicate

        if dy is None:
            return None, None, None, None, None, None, None
        for reference, version in ctx.versions:
            whole = reference()
            if whole is not None and whole._version != version:
                what = f"a DTensor of shape {tuple(whole.shape)} that backward reads has been modified by an in-place operation"
                raise RuntimeError(f"{ctx.name}: {what}: it is at version {whole._version}, and {version} is needed")
        wanted = tuple([Replicate() if each.is_partial() else each for each in ctx.placements])
        if dy.placements != wanted:
            dy = dy.redistribute(dy.device_mesh, wanted)
        local = _Local.apply(dy, ctx.placements).to(ctx.device)  # outside of the mesh it may be on a CPU
        return local, None, None, None, None, None, None


def _seed(local: Tensor, mesh: DeviceMesh, shards: tuple[Placement | None, ...], seed: Tensor | None) -> Tensor:
    """A seed for each shard, the same for its replicas."""
    import torch.distributed._functional_collectives as collectives

    at, count = 0, 1
    for place, placement in enumerate(shards):
        if placement is not None:
            at, count = at + mesh.get_local_rank(place) * count, count * mesh.size(place)
    # Far apart, so that seeds that follow one another have no shards in common.
    apart = (at * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
    if seed is not None:
        return (seed.full_tensor() if is_sharded(seed) else seed) + apart
    seed = drawn_seed(local) + apart
    for place, placement in enumerate(shards):
        if placement is None and mesh.size(place) > 1:
            seed = collectives.broadcast(seed, 0, (mesh, place))
    return seed
