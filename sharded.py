"""Calls for DTensors: each process computes its own shards, of tensors that are sharded alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from .configs import drawn_seed
from .records import Activation, layout
from .records.arguments import check_tensor, is_sharded, what_it_is
from .records.operands import broadcast_shape, by_channel, by_row

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
) -> Tensor:
    """A call for DTensors, whose result is sharded as they are.

    A dimension that any operand shards is sharded in the result, and in each operand that has it. Operands that are not so are
    redistributed first; a partial sum is added up.

    Args:
        record: of the activation.
        given: the tensors by name; those that are learned or have dimensions are DTensors of one mesh.
        call: the same for the shards of this process by name, and a seed.
        draws: whether the call draws random numbers: each shard other ones, its replicas the same.
        seed: of the caller, the same in all processes; None: a new one.
        packed: the dimension of ``x`` that holds both operands of a gated activation, which is not sharded; None without.

    Raises:
        TypeError: a tensor with dimensions is not a DTensor.
        ValueError: DTensors are of different meshes, or shapes do not match.
    """
    mesh = next(each.device_mesh for each in given.values() if is_sharded(each))
    _check_kinds(record, given, mesh)
    dims = _dims(record, given, packed)
    shards = _shards(mesh, given, dims)
    local = {name: _local(each, mesh, dims.of[name], shards) for name, each in given.items()}
    y = call(local, _seed(next(iter(local.values())), mesh, shards, seed) if draws else seed)
    return _whole(y, mesh, shards, next(iter(given.values())), dims.shape)


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
    for name, each in given.items():
        if not isinstance(each, Tensor):
            continue
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
    names = [name for name in given if name not in record.channels]
    if packed is not None:
        x = given["x"]
        shape = torch.Size([size // 2 if dim == packed else size for dim, size in enumerate(x.shape)])
        of = {"x": {dim: dim for dim in range(len(shape)) if dim != packed}}
    else:
        elements = [name for name in names if name in spec.tensors[: spec.elements]]
        shape = broadcast_shape(record, elements, [given[name] for name in elements])
        of = {name: _aligned(given[name].shape, shape) for name in elements}
    x = torch.empty(shape, device="meta")
    before = next(iter(given.values())).dim()
    for name, each in given.items():
        if name in of:
            continue
        of[name] = {}
        if not isinstance(each, Tensor) or each.numel() == 1:
            continue
        like = torch.empty(each.shape, device="meta")
        if name in record.channels:
            dim = record.channels[name].dim
            by_channel(record, name, record.channels[name], like, x, before)
            of[name] = {(dim if dim < 0 else dim - before) + len(shape): 0}
        elif name in spec.tensors:
            by_row(record, name, like, x)
            of[name] = {dim: dim for dim in range(len(shape) - 1)}
    return _Dims(shape, of)


def _aligned(own: torch.Size, shape: torch.Size) -> dict[int, int]:
    """The dimensions of ``shape`` that a tensor which broadcasts to it has, each with the tensor's own."""
    more = len(shape) - len(own)
    return {dim + more: dim for dim, size in enumerate(own) if size == shape[dim + more]}


def _shards(mesh: DeviceMesh, given: dict[str, Any], dims: _Dims) -> tuple[int | None, ...]:
    """For each dimension of the mesh that of the result which it shards: the first that an operand has sharded there."""
    found: list[int | None] = []
    for place in range(mesh.ndim):
        sharded = None
        for name, each in given.items():
            if sharded is None and is_sharded(each):
                own = _sharded_dim(each.placements[place])
                sharded = next((dim for dim, at in dims.of[name].items() if at == own), None)
        found.append(sharded)
    return tuple(found)


def _sharded_dim(placement: Placement) -> int | None:
    """The dimension that a placement shards evenly; None for replicas and partial sums."""
    from torch.distributed.tensor import Shard

    return placement.dim if type(placement) is Shard else None


def _local(given: Any, mesh: DeviceMesh, dims: dict[int, int], shards: tuple[int | None, ...]) -> Any:
    """The shard that this process computes with; its gradient is a partial sum where the result is sharded and it is not."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if not is_sharded(given):
        return given
    placements = tuple([Shard(dims[dim]) if dim in dims else Replicate() for dim in shards])
    of_gradient = tuple([Shard(dims[dim]) if dim in dims else Replicate() if dim is None else Partial() for dim in shards])
    if given.placements != placements:
        given = given.redistribute(mesh, placements)
    if torch.compiler.is_compiling():
        return given.to_local(grad_placements=of_gradient)
    return _Local.apply(given, of_gradient)


def _whole(y: Tensor, mesh: DeviceMesh, shards: tuple[int | None, ...], x: Tensor, shape: torch.Size) -> Tensor:
    """The DTensor of which ``y`` is this process's shard."""
    from torch.distributed.tensor import Replicate, Shard

    like = torch.empty(shape, device="meta")
    if x.shape == shape:
        like = torch.empty_like(torch.empty_strided(shape, x.stride(), device="meta"))
    given = mesh, tuple([Replicate() if dim is None else Shard(dim) for dim in shards]), shape, like.stride()
    return _made(y, *given) if torch.compiler.is_compiling() else _Whole.apply(y, *given)


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
    """The inverse. Of a partial sum each part's gradient is that of the sum."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        y: Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: torch.Size,
        stride: tuple[int, ...],
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.placements = placements
        return _made(y, mesh, placements, shape, stride)

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        from torch.distributed.tensor import Replicate

        if dy is None:
            return None, None, None, None, None
        wanted = tuple([Replicate() if each.is_partial() else each for each in ctx.placements])
        if dy.placements != wanted:
            dy = dy.redistribute(dy.device_mesh, wanted)
        return _Local.apply(dy, ctx.placements), None, None, None, None


def _seed(local: Tensor, mesh: DeviceMesh, shards: tuple[int | None, ...], seed: Tensor | None) -> Tensor:
    """A seed for each shard, the same for its replicas."""
    import torch.distributed._functional_collectives as collectives

    at, count = 0, 1
    for place, dim in enumerate(shards):
        if dim is not None:
            at, count = at + mesh.get_local_rank(place) * count, count * mesh.size(place)
    if seed is not None:
        return seed + at
    seed = drawn_seed(local) + at
    for place, dim in enumerate(shards):
        if dim is None and mesh.size(place) > 1:
            seed = collectives.broadcast(seed, 0, (mesh, place))
    return seed
