"""Calls of row activations where features meet: masks of wider types, integers, layouts, symbolic shapes, batched gradients."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rows_common import GRADIENT, needs_vectors, smallest
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import jitact
from jitact.measuring.row_errors import exact_gradient

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LOWEST = torch.finfo(F32).min
NAMES = ("softmax", "log_softmax", "softmin")


def test_traces_by_torch_jit_without_gradients_are_saved(device: str) -> None:
    """Tensors that are large enough for kernels are traced as their operators, as other activations are."""
    x = torch.randn(128, 4096, device=device)
    mask = torch.rand(128, 4096, device=device) > 0.1
    calls = [lambda x: jitact.log_softmax(x, -1, scale=0.5), lambda x: jitact.softmax(x, -1, mask=mask)]
    for call in (jitact.get("softmax")(-1), *calls):
        for recording in (False, True):  # a leaf where none is recorded, then what needs none
            leaf = x.clone().requires_grad_(not recording)
            with torch.set_grad_enabled(recording):
                traced = torch.jit.trace(call, (leaf,))
            torch.jit.save(traced, saved := io.BytesIO())
            saved.seek(0)
            assert torch.equal(torch.jit.load(saved)(x), call(x))


@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("rows", [4, 64])  # of 8192 elements: smaller than what kernels take, and larger
def test_masks_wider_than_x_are_not_rounded(rows: int, dtype: torch.dtype, save: str, device: str) -> None:
    """Nor do they become -inf, as the lowest float32 would in 16 bits."""
    torch.manual_seed(0)
    x, dy = (torch.randn(rows, 8192, device=device).to(dtype) for _ in range(2))
    mask = torch.randn(rows, 8192, device=device) * 4
    mask[0] = LOWEST
    mask[1, ::2] = LOWEST
    x[2, 1], mask[2, 0] = 50, 50.2
    x, mask = x.requires_grad_(), mask.requires_grad_()
    y = jitact.softmax(x, -1, mask=mask, save=save)
    exact = torch.softmax(x.double() + mask.double(), -1)
    assert y.dtype is dtype and torch.allclose(y[0].float() * 8192, torch.ones(1, device=device))
    torch.testing.assert_close(y.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    found = torch.autograd.grad(y, (x, mask), dy)
    for kept in (y, exact):  # what was kept, rounded or not
        wanted, sizes = exact_gradient("softmax", dy, kept.detach().double(), -1)
        beyond = [(each.double() - wanted).abs() - (GRADIENT[dtype] * sizes + smallest(dtype)) for each in found]
        if all((each <= 0).all() for each in beyond):
            break
    else:
        pytest.fail(f"gradients are off by {[float(each.max()) for each in beyond]}")
    assert [each.dtype for each in found] == [dtype, F32]
    with torch.autocast(device, BF16):
        assert jitact.softmax(x, -1, mask=mask).dtype is torch.softmax(x, -1).dtype


def test_masks_of_float64_and_large_scales_of_float16(device: str) -> None:
    x = torch.tensor([[1e-4, 2e-4, 0.0]], device=device)
    mask = torch.tensor([0.0, 0.0, torch.finfo(torch.float64).min], device=device, dtype=torch.float64)
    torch.testing.assert_close(jitact.softmax(x, -1, mask=mask), torch.softmax(x.double() + mask, -1).float())
    half, zeros = x.half(), torch.zeros(3, device=device, dtype=F16)
    exact = torch.softmax(1e5 * half.double(), -1)
    for mask in (zeros, zeros == 0, None):
        torch.testing.assert_close(jitact.softmax(half, -1, scale=1e5, mask=mask).double(), exact, rtol=1e-3, atol=1e-6)


def test_scaled_gradients_beside_those_of_masks(device: str) -> None:
    """Small ones of float16, which the scale makes large, are not rounded before they are scaled."""
    torch.manual_seed(0)
    x, mask, dy = (torch.randn(64, 8192, device=device).half() for _ in range(3))
    x, mask, dy = x.requires_grad_(), mask.requires_grad_(), dy * 1e-3
    both = torch.autograd.grad(jitact.softmax(x, -1, scale=1000.0, mask=mask), (x, mask), dy)
    alone = torch.autograd.grad(jitact.softmax(x, -1, scale=1000.0, mask=mask.detach()), x, dy)
    assert torch.equal(both[0], alone[0]) and both[1].abs().max() > 0


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_differentiable_gradients_from_inputs_of_16_bits(dtype: torch.dtype, device: str) -> None:
    """PyTorch's operators compute them from the output, unrounded, as kernels do."""
    torch.manual_seed(0)
    x, dy = (torch.randn(64, 8192, device=device).to(dtype) for _ in range(2))
    y = jitact.softmax(x.requires_grad_(), -1, save="input")
    (found,) = torch.autograd.grad(y, x, dy, create_graph=True)
    wanted, sizes = exact_gradient("softmax", dy, torch.softmax(x.detach().double(), -1))
    assert found.dtype is dtype and found.requires_grad
    assert ((found.double() - wanted).abs() <= GRADIENT[dtype] * sizes + smallest(dtype)).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_integers_are_converted_first(name: str, dtype: torch.dtype, device: str) -> None:
    for rows in (2, 40_000):
        x = torch.tensor([0, 1, 2, 127], dtype=dtype, device=device).repeat(rows, 75)
        exact = getattr(F, name)(x[:1].double(), -1)
        for scale in (1.0, 0.5):
            y = getattr(jitact, name)(x, -1, F32, scale=scale)
            wanted = exact if scale == 1 else getattr(F, name)(0.5 * x[:1].double(), -1)
            torch.testing.assert_close(y, wanted.float().expand(rows, -1), rtol=1e-5, atol=1e-6)


class _Attention(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).tril())

    def forward(self, q: Tensor) -> Tensor:
        return self.function(q @ q.mT, self.mask, q.shape[-1] ** -0.5)


def test_masks_of_fixed_size_beside_dynamic_shapes() -> None:
    module = _Attention(lambda x, mask, scale: jitact.softmax(x, -1, scale=scale, mask=mask))
    compiled, q = torch.compile(module, backend="eager", dynamic=True, fullgraph=True), torch.randn(4, 8, 8)
    torch.testing.assert_close(compiled(q), module(q))


def test_scales_from_dynamic_shapes_are_exported() -> None:
    class Scores(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            scores = q @ q.mT
            half = jitact.softmax(scores.half() / 100, -1, F32, scale=q.shape[1])  # converted first: not scaled in float16
            return jitact.softmin(scores, -1, scale=q.shape[1] ** -0.5) + jitact.softmax(scores, -1, scale=q.shape[1]) + half

    sizes = ({1: torch.export.Dim("size", min=2, max=100)},)
    program = torch.export.export(Scores(), (torch.randn(2, 8, 4),), dynamic_shapes=sizes, strict=False)
    for size in (8, 5):
        q = torch.randn(2, size, 4)
        torch.testing.assert_close(program.module()(q), Scores()(q))


@pytest.mark.parametrize("rows", [3, 300])  # fewer than kernels take, and more
def test_dimensions_and_scales_out_of_range(rows: int, device: str) -> None:
    x = torch.randn(rows, 1024, device=device).requires_grad_()
    for dim in (2, -3):
        for options in ({}, {"scale": 0.5}, {"mask": x.detach() > 0}, {"save": "input"}):
            with pytest.raises(IndexError, match="Dimension out of range"):
                jitact.softmax(x, dim, **options)
    for scale in (0.0, 2.0**-140):  # which the operators refuse
        (dx,) = torch.autograd.grad(jitact.softmax(x, -1, scale=scale), x, torch.randn_like(x))
        assert not dx.any() or scale
    infinite = jitact.softmax(x, -1, scale=math.inf, mask=x > 0)
    torch.testing.assert_close(infinite, torch.softmax((x * math.inf).masked_fill(x <= 0, -math.inf), -1), equal_nan=True)


def test_the_warning_about_a_dimension_points_to_the_call() -> None:
    for size in (3, 2**19):
        with pytest.warns(UserWarning, match="Implicit dimension choice") as caught:
            jitact.softmax(torch.ones(size))
        assert caught[0].filename == __file__


@pytest.mark.parametrize("options", [{"scale": 0.5}, {"save": "input"}, {"mask": "bool"}, {"dtype": F32}], ids=str)
def test_batched_gradients(options: dict, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8192, device=device, dtype=F16 if "dtype" in options else F32).requires_grad_()
    if "mask" in options:
        options = {"mask": torch.rand(8192, device=device) > 0.3}
    y = jitact.softmax(x, -1, **options)
    dy = torch.randn(3, 64, 8192, device=device, dtype=y.dtype)
    (found,) = torch.autograd.grad(y, x, dy, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in dy]
    torch.testing.assert_close(found, torch.stack(each), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_contiguous_as_those_of_pytorch(name: str, device: str) -> None:
    """So that a model may view them, whichever computes them."""
    torch.manual_seed(0)
    x = torch.randn(4, 16, 96, 96, device=device)
    for given in (x.to(memory_format=torch.channels_last), x.transpose(0, 1), x.mT, x[:, ::2]):
        given = given.detach().requires_grad_()
        for dim, options in ((1, {}), (-1, {}), (1, {"scale": 2.0}), (1, {"mask": torch.ones(96, device=device) > 0})):
            scale = options.get("scale", 1.0)
            ours, theirs = getattr(jitact, name)(given, dim, **options), getattr(F, name)(given * scale, dim)
            assert ours.stride() == theirs.stride(), (given.stride(), dim)
            exact, dy = getattr(F, name)(given.double() * scale, dim), torch.randn_like(ours)
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
            found, wanted = (torch.autograd.grad(y, given, dy.to(y.dtype))[0] for y in (ours, exact))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_masks_of_inference_mode_and_tensors_without_memory(device: str) -> None:
    with torch.inference_mode():
        mask = torch.rand(8192, device=device) > 0.3
    x = torch.randn(64, 8192, device=device).requires_grad_()
    (found,) = torch.autograd.grad(jitact.softmax(x, -1, mask=mask).square().sum(), x)
    (wanted,) = torch.autograd.grad(torch.softmax(x.masked_fill(~mask.clone(), -math.inf), -1).square().sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-9)
    zeros = torch._efficientzerotensor((64, 8192), device=device)
    torch.testing.assert_close(jitact.softmax(zeros, -1, scale=2), torch.full((64, 8192), 1 / 8192, device=device))
    for rows in (2, 64):
        freed = torch.randn(rows, 8192, device=device)
        freed.untyped_storage().resize_(0)
        for given in ((freed, 2.0, None), (torch.randn(rows, 8192, device=device), 1.0, freed)):
            with pytest.raises(RuntimeError, match="softmax: a tensor has elements, but its data is not allocated"):
                jitact.softmax(given[0], -1, scale=given[1], mask=given[2])


def test_exported_files_are_traced_as_pytorch(tmp_path) -> None:
    space: dict = {"__name__": "exported"}
    exec(compile(jitact.export("softmax", device="cpu"), "exported", "exec"), space)
    module, x = space["ModelNew"](-1), torch.randn(4, 64)
    assert "_softmax" in make_fx(module)(x).code
    torch.testing.assert_close(module(torch._efficientzerotensor((4, 64))), torch.full((4, 64), 1 / 64))


CHOSEN = """#include "rows.cuh"
ELEMENTWISE T forward(T kept, SumOfExp<T> row) {
  const T s = row.share(kept);
  return s > 0.1 ? sqrt(s - 0.1) : kept_elsewhere(s);
}
ELEMENTWISE T fold_from_output(T dy, T y) { return y > 0 ? dy / (2 * y) * (y * y + 0.1) : 0; }
ELEMENTWISE T backward_from_output(T dy, T y, Sum<T> row) { return y > 0 ? (y * y + 0.1) * (dy / (2 * y) - row.total) : 0; }
""".replace("kept_elsewhere(s)", "0")


def test_slopes_of_what_is_not_chosen_are_left_out(device: str) -> None:
    """An infinite or invalid slope beside the chosen value: sqrt(s - 0.1) of smaller shares."""
    jitact.define("root_of_share", source=CHOSEN)
    x = torch.tensor([0.0, 1.0, 2.0, -3.0, -math.inf], device=device, dtype=torch.float64)

    def reference(x: Tensor) -> Tensor:
        s = torch.softmax(x, -1)
        chosen = s > 0.1
        return torch.where(chosen, torch.where(chosen, s - 0.1, 1.0).sqrt(), 0.0)

    for function in (jitact.root_of_share, torch.compile(jitact.root_of_share, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(function(leaf).sum(), leaf)
        (wanted,) = torch.autograd.grad(reference(leaf).sum(), leaf)
        torch.testing.assert_close(found, wanted)
    for transform in (torch.func.grad, torch.func.hessian):
        found, wanted = (transform(lambda x, f=f: f(x).sum())(x[:4]) for f in (jitact.root_of_share, reference))
        torch.testing.assert_close(found, wanted)


SCALED = """#include "rows.cuh"
ELEMENTWISE T forward(T kept, SumOfExp<T> row, Number<T> a) { return a * row.share(kept); }
ELEMENTWISE T fold_from_output(T dy, T y, Number<T>) { return dy * y / 2; }
ELEMENTWISE T backward_from_output(T dy, T y, Sum<T> row, Number<T>) { return y * (dy - row.total); }
"""


def test_masks_of_definitions_under_autocast(device: str) -> None:
    """The result has x's type, whatever the mask's, as that of a definition without one."""
    jitact.define("twice_share", source=SCALED, a=2.0)
    x = torch.randn(6, 8, device=device).bfloat16()
    with torch.autocast(device, BF16):
        for mask in (None, x > 0, torch.zeros(8, device=device), torch.zeros(8, device=device, dtype=BF16)):
            assert jitact.twice_share(x, -1, mask=mask).dtype is BF16


BY_ROW = """#include "rows.cuh"
ELEMENTWISE T forward(T kept, SumOfExp<T> row, Row<T> r) { return r * row.share(kept); }
ELEMENTWISE T fold_from_output(T dy, T y, Row<T>) { return dy * y; }
ELEMENTWISE T backward_from_output(T dy, T y, Sum<T> row, Row<T> r) { return y * (dy - row.total / r); }
ELEMENTWISE T backward_of_row(Sum<T> row, Row<T> r) { return row.total / r; }
"""


def test_row_operands_of_transforms_and_of_empty_tensors(device: str) -> None:
    jitact.define("share_by_row", source=BY_ROW)
    x, r = torch.randn(4, 8, device=device), torch.rand(3, 4, device=device)
    expected = r[..., None] * torch.softmax(x, -1)
    torch.testing.assert_close(torch.func.vmap(lambda r: jitact.share_by_row(x, r))(r), expected)
    negative = r[0]._neg_view()
    torch.testing.assert_close(jitact.share_by_row(x, negative), -expected[0])
    masked = torch.softmax(x.masked_fill(x < 0, -math.inf), -1)
    torch.testing.assert_close(jitact.share_by_row(x, negative, mask=x >= 0), -r[0, :, None] * masked, equal_nan=True)
    for shape in ((0, 8), (4, 0)):
        x, r = (torch.ones(size, device=device).requires_grad_() for size in (shape, shape[:1]))
        y = jitact.share_by_row(x, r)
        assert y.shape == x.shape and not any(each.any() for each in torch.autograd.grad(y.sum(), (x, r)))


@needs_vectors
@pytest.mark.parametrize(("name", "rows"), [("softmax", 2**12), ("log_softmax", 2**12), ("twice_share", 6)])
def test_differentiable_gradients_are_scaled_before_they_are_rounded(name: str, rows: int, device: str) -> None:
    """As those by kernels: small ones of float16 become large by the scale."""
    jitact.define("twice_share", source=SCALED, a=2.0)
    torch.manual_seed(0)
    x, dy = (torch.randn(rows, 512, device=device) for _ in range(2))
    x, dy = (x / 1000).half().requires_grad_(), (dy * 2e-5).half()
    y = getattr(jitact, name)(x, -1, scale=1000.0)
    plain = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    differentiable = torch.autograd.grad(y, x, dy, create_graph=True)[0]
    if name == "twice_share":
        torch.testing.assert_close(differentiable, plain, rtol=2e-3, atol=1e-7)
        return
    exact, sizes = exact_gradient(name, dy, y.detach())
    for dx in (plain, differentiable):
        assert ((dx.double() / 1000 - exact).abs() <= GRADIENT[torch.float16] * sizes + smallest(torch.float16) / 1000).all()


def test_row_operands_beside_integers_have_gradients(device: str) -> None:
    jitact.define("share_by_row", source=BY_ROW)
    x, dy = torch.arange(24, device=device).view(3, 8) % 5, torch.randn(3, 8, device=device)
    r = torch.rand(3, device=device).requires_grad_()
    (found,) = torch.autograd.grad(jitact.share_by_row(x, r, dtype=F32), r, dy)
    torch.testing.assert_close(found, (torch.softmax(x.float(), -1) * dy).sum(-1))


def test_numbers_of_modules_are_checked() -> None:
    cls = jitact.define("right_for_two", source=SCALED, a=2.0)
    assert jitact.check(cls(), dtypes=[F32])
    result = jitact.check(cls(a=5.0), dtypes=[F32])
    assert not result and "a=5" in result.table


def test_files_that_use_what_a_fold_keeps_are_refused() -> None:
    text = SCALED.replace("a * row.share(kept)", "a * kept * row.share(kept)")
    with pytest.raises(ValueError, match=r"uses_kept: forward uses kept otherwise than as row.share\(kept\)"):
        jitact.define("uses_kept", source=text, a=2.0)
    with pytest.raises(ValueError, match="two arguments called row"):
        jitact.define("named_alike", source=SCALED.replace("Number<T> a)", "Number<T> row)").replace("a * ", ""), row=2.0)


@pytest.mark.parametrize("name", ["softmax", "Softmax", "soft_max", "softmax2d", "LogSoftmax", "logsoftmax", "soft_min"])
def test_names_of_row_activations_are_taken(name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be called '{name}': .* is jitact's own"):
        jitact.define(name, "x * 2")
    with pytest.raises(ValueError, match=f"cannot be called '{name}': .* is jitact's own"):
        jitact.define(name, source=SCALED, a=2.0)


def test_errors_of_calls() -> None:
    x, cls = torch.randn(3, 3), jitact.define("scaled_shares", source=SCALED, a=2.0)
    for call, error, message in (
        (lambda: jitact.softmax(x, 0, torch.int64, scale=2.0), TypeError, "softmax: dtype is .* or None, got torch.int64"),
        (lambda: jitact.softmax(x, 0, torch.float8_e5m2), TypeError, "softmax: dtype is float32, .*, got torch.float8_e5m2"),
        (lambda: jitact.softmax(x, 0, "float32", mask=x > 0), TypeError, "softmax: dtype is .* or None, got 'float32'"),
        (lambda: jitact.softmax(x.long(), 0, scale=2.0), TypeError, "without dtype=, x is float32, .*; got an int64"),
        (lambda: jitact.softmax(x.to_sparse(), 0, mask=x > 0), TypeError, "softmax: expected a dense tensor, got a sparse_coo"),
        (lambda: jitact.softmax(x, 0, mask=x.to_sparse()), TypeError, "softmax: mask is a dense tensor"),
        (lambda: jitact.softmax(x, 0, scale=10**400), ValueError, "softmax: scale must fit into a float"),
        (lambda: jitact.softmax(x, True), TypeError, "softmax: dim is an int, got a bool"),
        (lambda: jitact.softmax(torch.randn(1000, 3000), True), TypeError, "softmax: dim is an int, got a bool"),
        (lambda: jitact.scaled_shares(x, dim=None), TypeError, "scaled_shares: dim is an int, got None"),
        (lambda: jitact.get("Softmax2d")()([1]), TypeError, "softmax: expected a tensor, got a list"),
        (lambda: cls(save="bit"), ValueError, "scaled_shares: save must be 'output' or 'input', got 'bit'"),
        (lambda: cls.Model(0, q=5.0), TypeError, "takes dim, a, not q"),
    ):
        with pytest.raises(error, match=message):
            call()
