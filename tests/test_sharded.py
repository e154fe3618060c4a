"""DTensors, beside the same calls of whole tensors. Run as a program, this file is the processes of a mesh."""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jitact
from jitact.configs import BEFORE_2_13

PROCESSES = 4
needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def shards(whole: Tensor, mesh, *placements) -> Tensor:
    """A DTensor that requires a gradient, of a tensor that all processes have."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = [*placements, *[Replicate()] * mesh.ndim][: mesh.ndim]
    return distribute_tensor(whole.detach(), mesh, placements).requires_grad_(whole.is_floating_point())


def placements(mesh, *dims: int) -> Iterator[tuple]:
    """All placements that shard some of these dimensions."""
    from torch.distributed.tensor import Replicate, Shard

    return itertools.product([Replicate(), *map(Shard, dims)], repeat=mesh.ndim)


def random(mesh, *shape: int) -> Tensor:
    """A tensor that is the same in all processes."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(mesh.device_type)


def compare(
    function: Callable[..., Tensor], given: list[Tensor], wholes: list[Tensor], expected: Callable[..., Tensor] | None = None
) -> Tensor:
    """Checks a call for DTensors, and all gradients, by the call for whole tensors. Returns the former's result."""
    from torch.distributed.tensor import DTensor

    wholes = [each.detach().clone().requires_grad_() for each in wholes]
    y, whole = function(*given), (expected or function)(*wholes)
    assert type(y) is DTensor and y.stride() == whole.stride()
    torch.testing.assert_close(y.full_tensor(), whole)
    (y * y).sum().backward()
    (whole * whole).sum().backward()
    for each, reference in zip(given, wholes, strict=True):
        torch.testing.assert_close(each.grad.full_tensor(), reference.grad)
    return y


def check_one_tensor(mesh) -> None:
    x = random(mesh, 7, 10)
    for each in placements(mesh, 0, 1):
        for call in (jitact.relu, lambda t: jitact.leaky_relu(t, 0.3), jitact.get("silu")()):
            y = compare(call, [shards(x, mesh, *each)], [x])
            assert y.placements == each
    compare(jitact.silu, [shards(x.t(), mesh, *each)], [x.t()])
    with torch.no_grad():
        assert torch.equal(jitact.silu(shards(x, mesh, *each)).full_tensor(), jitact.silu(x))


def check_operands(mesh) -> None:
    x, b, r = random(mesh, 7, 10), random(mesh, 10), random(mesh, 7, 10)
    for of_x, of_b, of_r in itertools.product(placements(mesh, 0, 1), placements(mesh, 0), list(placements(mesh, 1))[-2:]):
        given = [shards(x, mesh, *of_x), shards(b, mesh, *of_b), shards(r, mesh, *of_r)]
        compare(lambda x, b, r: jitact.gelu(x, bias=b, residual=r), given, [x, b, r])


def check_operands_that_broadcast(mesh) -> None:
    for of_x, of_other in itertools.product(list(placements(mesh, 1))[-2:], placements(mesh, 0, 1)):
        x, other, up = random(mesh, 1, 10), random(mesh, 6, 1), random(mesh, 3, 6, 10)
        compare(lambda x, r: jitact.gelu(x, residual=r), [shards(x, mesh, *of_x), shards(other, mesh, *of_other)], [x, other])
        compare(jitact.swiglu, [shards(other, mesh, *of_other), shards(up, mesh, *of_x)], [other, up])
        images, values = up.transpose(0, 1), random(mesh, 3)
        for call in (lambda x, b: jitact.gelu(x, bias=b, channel_dim=1), jitact.prelu):
            compare(call, [shards(images, mesh, *of_other), shards(values, mesh)], [images, values])


def check_halves(mesh) -> None:
    x, weights = random(mesh, 6, 10, 4), random(mesh, 6, 10)
    single, gated_prelu = random(mesh, 1, 10), jitact.gated("prelu")(dim=1, weight=5).to(mesh.device_type)
    for of_x, of_w in itertools.product(placements(mesh, 0), repeat=2):
        given = [shards(single, mesh, *of_x), shards(single[:, 0], mesh, *of_w)]
        compare(lambda x, w: jitact.swiglu(x, row_weight=w), given, [single, single[:, 0]])
        given = [shards(x, mesh, *of_x), shards(random(mesh, 5), mesh, *of_w)]
        compare(lambda x, w: torch.func.functional_call(gated_prelu, {"weight": w}, (x,)), given, [x, random(mesh, 5)])
    for of_x, of_w in itertools.product(placements(mesh, 0, 1, 2), list(placements(mesh, 1))[-1:]):
        for options in ({"layout": "interleaved"}, {"gate": "last", "dim": 0}):
            compare(lambda x, options=options: jitact.swiglu(x, **options), [shards(x, mesh, *of_x)], [x])
        given = [shards(x, mesh, *of_x), shards(weights, mesh, *of_w)]
        compare(lambda x, w: jitact.swiglu(x, row_weight=w), given, [x, weights])


def check_partial_sums(mesh) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    x = random(mesh, 7, 10)
    part = DTensor.from_local(x, mesh, [Partial(), *[Replicate()] * (mesh.ndim - 1)], run_check=False).requires_grad_()
    y = jitact.silu(part)
    y.sum().backward()
    whole = (x * mesh.size(0)).requires_grad_()
    F.silu(whole).sum().backward()
    torch.testing.assert_close(y.full_tensor(), F.silu(whole))
    torch.testing.assert_close(part.grad.full_tensor(), whole.grad)


def check_random_numbers(mesh) -> None:
    """Each shard has its own, replicas have the same."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard

    torch.manual_seed(1 + dist.get_rank())
    seed = torch.tensor(5, device=mesh.device_type)
    for call in (
        lambda x: jitact.relu(x, dropout=0.5),
        lambda x: jitact.relu(x, dropout=0.5, seed=seed),
        lambda x: jitact.rrelu(-x, training=True),
        lambda x: jitact.gated("rrelu")()(torch.cat([-x, x.detach()], -1)),
    ):
        x = shards(torch.ones(64, 64, device=mesh.device_type), mesh, Shard(0))
        y = call(x)
        assert y.placements == x.placements
        y.sum().backward()
        (parts,) = y.to_local().detach().split(64 // mesh.size(0)),
        found = [torch.empty_like(parts[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(found, parts[0].contiguous())
        replicas = dist.get_world_size() // mesh.size(0)
        assert all(torch.equal(found[i], found[i // replicas * replicas]) for i in range(len(found)))
        assert not torch.equal(found[0], found[-1])
        kept = y.full_tensor()
        assert kept.ne(kept[0, 0]).double().mean() > 0.05 and torch.allclose(x.grad.full_tensor().abs(), kept.abs().detach())
    x, there = shards(torch.ones(64, 64, device=mesh.device_type), mesh, Shard(0)), 64 // mesh.size(0)
    of_five, of_six = [jitact.relu(x, dropout=0.5, seed=seed + more).full_tensor() for more in (0, 1)]
    assert not torch.equal(of_five[there : 2 * there], of_six[:there]), "seeds that follow one another have no shards in common"
    assert torch.equal(jitact.relu(x, dropout=0.5, seed=shards(seed.view(1), mesh)).full_tensor(), of_five)
    state = torch.get_rng_state()
    jitact.rrelu(x)
    assert torch.equal(torch.get_rng_state(), state), "in evaluation none is drawn"


def check_in_place(mesh) -> None:
    from torch.distributed.tensor import Shard

    x, r = random(mesh, 7, 10), random(mesh, 7, 10)
    for call in (jitact.silu, jitact.relu, jitact.leaky_relu):  # they keep the input, a bit, the output
        compare(lambda x, call=call: call(x * 1, inplace=True), [shards(x, mesh, Shard(0))], [x])
    given = [shards(x, mesh, Shard(0)), shards(r, mesh, Shard(1))]
    compare(lambda x, r: jitact.gelu(x * 1, residual=r) + jitact.relu(x * 1, inplace=True), given, [x, r])
    changed = shards(x, mesh, Shard(1)).detach()
    assert jitact.silu(changed, inplace=True) is changed
    torch.testing.assert_close(changed.full_tensor(), F.silu(x))
    with pytest.raises(RuntimeError, match="silu: a leaf that requires a gradient"):
        jitact.silu(shards(x, mesh), inplace=True)


def check_second_derivatives(mesh) -> None:
    x = random(mesh, 7, 10)
    for each in placements(mesh, 0, 1):
        found = []
        for given in (shards(x, mesh, *each), x.clone().requires_grad_()):
            (slope,) = torch.autograd.grad(jitact.mish(given).sum(), given, create_graph=True)
            found += torch.autograd.grad((slope * slope).sum(), given)
        torch.testing.assert_close(found[0].full_tensor(), found[1])


def check_third_derivatives(mesh) -> None:
    """Of gradients of every operand, also where that is a partial sum, by every operand."""
    if BEFORE_2_13:  # where PyTorch's own gradient of a redistribution has none
        return
    x, b, r = random(mesh, 7, 10), random(mesh, 10), random(mesh, 7, 10)
    for of_x, of_b in itertools.product(placements(mesh, 0, 1), placements(mesh, 0)):
        found = []
        for given in (
            [shards(x, mesh, *of_x), shards(b, mesh, *of_b), shards(r, mesh)],
            [each.clone().requires_grad_() for each in (x, b, r)],
        ):
            y = jitact.mish(given[0], bias=given[1]) * given[2]
            slopes = torch.autograd.grad((y * y).sum(), given, create_graph=True)
            total = sum([(each * each).sum() for each in slopes])
            found.append(torch.autograd.grad(total, given, create_graph=True))
            total = sum([(each * each).sum() for each in found[-1]])
            found[-1] += torch.autograd.grad(total, given)
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())


def check_second_derivatives_of_gradients_that_lie_otherwise(mesh) -> None:
    """As behind a linear layer of which the columns are sharded, whose input has a partial sum as its gradient."""
    from torch.distributed.tensor import Replicate, Shard

    if BEFORE_2_13:
        return
    x, w = random(mesh, 6, 8), random(mesh, 8, 4)
    for of_x, of_w in ((Replicate(), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(0))):
        found = []
        for given, weight in ((shards(x, mesh, of_x), shards(w, mesh, of_w)), (x.clone().requires_grad_(), w)):
            y = jitact.mish(given) @ weight
            (slope,) = torch.autograd.grad((y * y).sum(), given, create_graph=True)
            found += torch.autograd.grad((slope * slope).sum(), given)
        torch.testing.assert_close(found[0].full_tensor(), found[1], rtol=1e-4, atol=1e-4)


def check_changes_in_place(mesh) -> None:
    """What backward reads may not be changed before it; what it does not read may be."""
    from torch.distributed.tensor import Shard

    x, r = random(mesh, 8, 10), random(mesh, 8, 10)

    def leaf(t: Tensor) -> Tensor:
        return shards(t, mesh, Shard(0)) * 1

    for call, changed in (
        (lambda h: (jitact.silu(h), h), lambda y, h: h.mul_(3)),
        (lambda h: (jitact.silu(h), h), lambda y, h: h[:, :2].mul_(3)),
        (lambda h: (jitact.tanh(h), h), lambda y, h: y.mul_(3)),
        (lambda h: (jitact.swiglu(h), h), lambda y, h: h.mul_(3)),
        (lambda h: (jitact.swiglu(leaf(r), h), h), lambda y, h: h.mul_(3)),
    ):
        y, h = call(leaf(x))
        changed(y, h)
        with pytest.raises(RuntimeError, match="backward reads has been modified by an in-place operation"):
            y.sum().backward()
    for call in (
        lambda h: (jitact.relu(h), h),
        lambda h: (jitact.tanh(h), h),
        lambda h: (jitact.silu(leaf(r), residual=h), h),
        lambda h: (jitact.silu(h.redistribute(mesh, [Shard(1)] * mesh.ndim)), h),
    ):
        y, h = call(leaf(x))
        h.mul_(3)
        y.sum().backward()


def check_outside_of_the_mesh(mesh) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    part = DeviceMesh(mesh.device_type, list(range(mesh.size() // 2)))
    x, b, w = random(mesh, 8, 10), random(mesh, 10), random(mesh, 8)
    for call in (
        lambda x, b, w: jitact.silu(x),
        lambda x, b, w: jitact.gelu(x, bias=b, dropout=0.5),
        lambda x, b, w: jitact.swiglu(x, row_weight=w),
        lambda x, b, w: jitact.swiglu(x, x),
        lambda x, b, w: jitact.prelu(x, b),
    ):
        given = [shards(each, part, Shard(0)) for each in (x, b, w)]
        y = call(*given)
        assert y.shape == (call(x, b, w)).shape and y.placements == (Shard(0),)
        assert (y.to_local().numel() > 0) == (dist.get_rank() < part.size())
        y.sum().backward()
        assert given[0].grad.shape == x.shape


def check_strides(mesh) -> None:
    """So that views are possible where those of whole tensors are."""
    from torch.distributed.tensor import DTensor, Shard

    images = random(mesh, 4, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    x = DTensor.from_local(images, mesh, [Shard(0), *shards(images, mesh).placements[1:]])
    y = jitact.swiglu(x, dim=1)
    assert y.stride() == torch.empty(y.shape).contiguous(memory_format=torch.channels_last).stride()
    y.flatten(1)
    row, r = random(mesh, 1, 6), random(mesh, 6, 4).t()
    jitact.gelu(shards(row, mesh), residual=shards(r, mesh)).flatten()


def check_flattened(mesh) -> None:
    """Pieces that do not lie one after another stay where they are."""
    from torch.distributed.tensor import Shard

    if mesh.ndim < 2 or BEFORE_2_13:  # which cannot flatten such tensors
        return
    x, r = random(mesh, 4, 6, 10), random(mesh, 4, 6, 10)
    given = [shards(each, mesh, Shard(0), Shard(1)).flatten(0, 1) for each in (x, r)]
    for y, exact in (
        (jitact.silu(given[0]), F.silu(x)),
        (jitact.gelu(given[0], residual=given[1]), F.gelu(x) + r),
        (jitact.swiglu(given[0]), jitact.swiglu(x)),
    ):
        assert y.placements == given[0].placements
        torch.testing.assert_close(y.unflatten(0, (4, 6)).full_tensor(), exact)
    other = shards(r.flatten(0, 1), mesh, Shard(0))
    torch.testing.assert_close(jitact.gelu(given[0], residual=other).full_tensor(), (F.gelu(x) + r).flatten(0, 1))


def check_transforms(mesh) -> None:
    from torch.distributed.tensor import Shard

    x = random(mesh, 8, 10)
    for call in (jitact.silu, lambda x: jitact.gelu(x, residual=x), jitact.swiglu):
        ours = torch.func.grad(lambda x, call=call: call(x).sum())(shards(x, mesh, Shard(0)).detach())
        torch.testing.assert_close(ours.full_tensor(), torch.func.grad(lambda x, call=call: call(x).sum())(x))


def check_export(mesh) -> None:
    from torch.distributed.tensor import Shard

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return jitact.swiglu(jitact.silu(x), jitact.relu(x))

    x = random(mesh, 8, 10)
    given = shards(x, mesh, Shard(0)).detach()
    program = torch.export.export(Block(), (given,), strict=False)
    torch.testing.assert_close(program.module()(given).full_tensor(), Block()(x))


def check_definitions(mesh) -> None:
    x, w, a = random(mesh, 6, 10), random(mesh, 10), random(mesh, 1)
    jitact.define("of_shards", "tanh(a * x) * w", w=jitact.Channel(), a=jitact.Channel(one=True))
    for of_x, of_w in itertools.product(placements(mesh, 0, 1), placements(mesh, 0)):
        given = [shards(x, mesh, *of_x), shards(w, mesh, *of_w), shards(a, mesh)]
        compare(lambda x, w, a: jitact.of_shards(x, w=w, a=a), given, [x, w, a])


def check_rows(mesh) -> None:
    x = random(mesh, 6, 10)
    for each in placements(mesh, 0, 1):
        compare(lambda x: jitact.softmax(x, -1), [shards(x, mesh, *each)], [x])


def check_models(mesh) -> None:
    """A model in which weights and inputs are DTensors, with modules and calls replaced."""
    from torch.distributed.tensor import Shard, distribute_module

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(10, 8), nn.GELU(), nn.Linear(8, 8), nn.PReLU(8), nn.ReLU(inplace=True)).to(mesh.device_type)
    x = random(mesh, 12, 10)
    jitact.replace(plain)
    expected = plain(x)
    model = distribute_module(copy.deepcopy(plain), mesh)
    y = model(shards(x, mesh, Shard(0)))
    torch.testing.assert_close(y.full_tensor(), expected)
    for result in (expected, y):
        result.square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    with jitact.patched():
        torch.testing.assert_close(F.silu(shards(x, mesh, Shard(0))).full_tensor(), F.silu(x))


def check_compiled(mesh) -> None:
    from torch.distributed.tensor import Shard

    x, b, r, up = random(mesh, 8, 10), random(mesh, 10), random(mesh, 8, 10), random(mesh, 8, 20)
    fused = lambda x, b, r: jitact.gelu(x, bias=b, residual=r) * 2  # noqa: E731
    packed = lambda x: jitact.swiglu(jitact.silu(x))  # noqa: E731
    given = [shards(x, mesh, Shard(0)), shards(b, mesh), shards(r, mesh, Shard(1))]
    compare(torch.compile(fused, backend="aot_eager", fullgraph=True), given, [x, b, r], fused)
    compare(torch.compile(packed, backend="aot_eager", fullgraph=True), [shards(up, mesh, Shard(0))], [up], packed)
    drawn = torch.compile(lambda x: jitact.relu(x, dropout=0.5), backend="aot_eager", fullgraph=True)
    ones = shards(torch.ones(64, 64, device=mesh.device_type), mesh, Shard(0))
    assert not torch.equal(drawn(ones).full_tensor(), drawn(ones).full_tensor())


def check_errors(mesh) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    x, b = random(mesh, 8, 10), random(mesh, 10)
    sharded = shards(x, mesh, Shard(1))
    other = init_device_mesh(mesh.device_type, (mesh.size(),))
    for call, error, text in (
        (lambda: jitact.gelu(sharded, bias=b), TypeError, r"gelu\+bias: bias must be a DTensor beside other DTensors, got a f"),
        (lambda: jitact.gelu(x, bias=shards(b, mesh)), TypeError, r"gelu\+bias: x must be a DTensor beside other DTensors"),
        (lambda: jitact.swiglu(sharded, row_weight=x[:, 0]), TypeError, "row_weight must be a DTensor"),
        (lambda: jitact.gelu(sharded, bias=shards(b[:5], mesh)), ValueError, "values of bias must be 1 or 10, as .*; got 5"),
        (lambda: jitact.swiglu(sharded, shards(x[:, :5], mesh)), ValueError, r"do not broadcast: gate \(8, 10\), up \(8, 5\)"),
        (lambda: jitact.swiglu(sharded, row_weight=shards(b, mesh)), ValueError, r"row_weight must be of shape \(8,\)"),
        (lambda: jitact.gelu(sharded, residual=1.0), TypeError, r"gelu\+residual: residual must be a dense .*, got a float"),
        (lambda: jitact.swiglu(sharded, 1.0), TypeError, "swiglu: up must be a dense .*, got a float"),
        (lambda: jitact.relu(shards(x.int(), mesh)), TypeError, "relu: expected a dense float32, .* got an int32 tensor"),
        (lambda: jitact.silu(sharded, save="bit"), ValueError, "save='bit' is not possible"),
    ):
        with pytest.raises(error, match=text):
            call()
    if mesh.ndim > 1:
        with pytest.raises(ValueError, match=r"gelu\+bias: bias is on another mesh"):
            jitact.gelu(sharded, bias=shards(b, other))
    one = torch.tensor(1.0, device=mesh.device_type)
    torch.testing.assert_close(jitact.gelu(sharded, bias=one).full_tensor(), F.gelu(x + 1))


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpus)])
def test_on_a_mesh(device: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, device, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    processes = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
    assert len(processes) > 1, done.stdout + done.stderr
    failed = [each.get(name, f"{name} did not end\n{done.stderr}") for each in processes for name in CHECKS]
    assert not any(failed), "".join(failed)


def main(device: str, folder: Path) -> None:
    """Forks the processes of a mesh, each of which writes what failed."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    count = torch.cuda.device_count() if device == "cuda" else PROCESSES
    shape = (2, count // 2) if count > 2 else (2,)
    children = []
    for rank in range(count):
        child = os.fork()
        if child:
            children.append(child)
            continue
        if device == "cuda":
            torch.cuda.set_device(rank)
        store = dist.FileStore(str(folder / "store"), count)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=240))
        mesh = init_device_mesh(device, shape)
        found: dict[str, str] = {}
        for name, check in CHECKS.items():
            found[name] = ""
            try:
                check(mesh)
            except BaseException:
                found[name] = f"process {rank}: {traceback.format_exc()}"
            (folder / f"{rank}.json").write_text(json.dumps(found))
            dist.barrier()
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
