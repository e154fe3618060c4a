"""The table of activations, one entry each. Formulas and their operands are in ``kernels/<name>.cu``."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from . import references as ref
from .gating import references as gates
from .kernels import Work
from .modules import _revive  # noqa: F401  # pickles of older versions look it up here
from .records import Activation, Channel, Gating, Requirement, library

__all__ = ["TABLE"]

AS_PYTORCH = 'Backward keeps the output as PyTorch does, with the error of its rounding; save="input" is exact.'
OUTPUT_FIRST = ("output", "input")
TINY = 2.0**-126
"""The least normal float32: the reciprocals of smaller numbers may be infinite."""


def _positive(name: str, index: int = 0, save: str | None = None) -> tuple[Requirement, ...]:
    return (Requirement(f"{name} > 0", lambda *params: params[index] > 0, save),)


def _preset(name: str, title: str, formula: str, of: str, **how: str) -> Activation:
    """A gated activation that differs from another only in how a single tensor holds gate and up."""
    own = library[of]
    gating = own.gating._replace(preset_of=of, of="", **how)
    return replace(own, name=name, title=title, formula=formula, aliases=(), notes="", gating=gating)


# fmt: off
TABLE: tuple[Activation, ...] = (
    # Piecewise linear: one bit per element is all that backward needs.
    Activation("relu", "ReLU", "max(x, 0)", F.relu, inplace=True, module=nn.ReLU),
    Activation("leaky_relu", "LeakyReLU", "x for x > 0, else negative_slope x", F.leaky_relu, (("negative_slope", 0.01),),
               inplace=True, module=nn.LeakyReLU),
    Activation("relu6", "ReLU6", "clamp(x, 0, 6)", F.relu6, inplace=True, module=nn.ReLU6),
    Activation("hardtanh", "Hardtanh", "clamp(x, min_val, max_val)", F.hardtanh, (("min_val", -1.0), ("max_val", 1.0)),
               inplace=True, module=nn.Hardtanh, requires=(Requirement("min_val <= max_val", lambda low, high: low <= high),)),
    Activation("hardsigmoid", "Hardsigmoid", "clamp(x + 3, 0, 6) / 6", F.hardsigmoid, inplace=True, module=nn.Hardsigmoid,
               exact=ref.exact_hardsigmoid),
    Activation("threshold", "Threshold", "x for x > threshold, else value", F.threshold,
               (("threshold", 0.1), ("value", 20.0)), inplace=True, module=nn.Threshold,
               notes="PyTorch has no defaults for threshold and value; these are its documentation's."),
    Activation("hardshrink", "Hardshrink", "0 for |x| <= lambd, else x", F.hardshrink, (("lambd", 0.5),),
               module=nn.Hardshrink),
    Activation("softshrink", "Softshrink", "x - clamp(x, -lambd, lambd)", F.softshrink, (("lambd", 0.5),),
               module=nn.Softshrink, requires=(Requirement("0 <= lambd < inf", lambda lambd: 0 <= lambd < math.inf),)),
    Activation("sparse_sigmoid", "SparseSigmoid", "clamp((x + 1) / 2, 0, 1)", ref.sparse_sigmoid,
               exact=ref.exact_sparse_sigmoid),

    # Smooth, with a slope that can be computed from the output.
    Activation("sigmoid", "Sigmoid", "1 / (1 + exp(-x))", torch.sigmoid, module=nn.Sigmoid,
               exact=ref.exact_sigmoid, gradient_from_output=ref.sigmoid_from_output, declared_saves=OUTPUT_FIRST,
               notes=AS_PYTORCH),
    Activation("tanh", "Tanh", "tanh(x)", torch.tanh, module=nn.Tanh, gradient_from_output=ref.tanh_from_output,
               declared_saves=OUTPUT_FIRST, notes=AS_PYTORCH, work=Work(2, 1)),
    Activation("softsign", "Softsign", "x / (1 + |x|)", F.softsign, module=nn.Softsign,
               gradient_from_output=ref.softsign_from_output),
    Activation("elu", "ELU", "x for x > 0, else alpha (exp(x) - 1)", F.elu, (("alpha", 1.0),), inplace=True,
               module=nn.ELU, exact=ref.exact_elu, gradient_from_output=ref.elu_from_output,
               requires=_positive("alpha", save="output")),
    Activation("celu", "CELU", "max(x, 0) + min(alpha (exp(x / alpha) - 1), 0)", F.celu, (("alpha", 1.0),),
               inplace=True, module=nn.CELU, exact=ref.exact_celu, gradient_from_output=ref.celu_from_output,
               requires=_positive("alpha")),
    Activation("selu", "SELU", "S x for x > 0, else S A (exp(x) - 1); S = 1.0507..., A = 1.6732...", F.selu,
               inplace=True, module=nn.SELU, exact=ref.exact_selu, gradient_from_output=ref.selu_from_output,
               notes="fast_math=True computes exp(x) - 1 without expm1, without a branch: absolute error up to 5e-7."),
    Activation("softplus", "Softplus", "log(1 + exp(beta x)) / beta, x where beta x > threshold", F.softplus,
               (("beta", 1.0), ("threshold", 20.0)), module=nn.Softplus, exact=ref.exact_softplus,
               gradient_from_output=ref.softplus_from_output,
               requires=(*_positive("beta"), Requirement("threshold >= 20", lambda beta, limit: limit >= 20, "output")),
               work=Work(4, 1)),
    Activation("logsigmoid", "LogSigmoid", "-log(1 + exp(-x))", F.logsigmoid, module=nn.LogSigmoid,
               gradient_from_output=ref.logsigmoid_from_output, work=Work(2, 1)),
    Activation("relu2", "ReLUSquared", "max(x, 0)^2", ref.relu2, gradient_from_output=ref.relu2_from_output,
               aliases=("squared_relu",), transformers=("ReLUSquaredActivation",)),
    Activation("squareplus", "Squareplus", "(x + sqrt(x^2 + b)) / 2", ref.squareplus, (("b", 4.0),),
               exact=ref.exact_squareplus, gradient_from_output=ref.squareplus_from_output, requires=_positive("b"),
               work=Work(4, 1)),
    Activation("softcap", "Softcap", "c tanh(x / c)", ref.softcap, (("c", 30.0),),
               gradient_from_output=ref.softcap_from_output, requires=_positive("c"), work=Work(4, 1)),
    Activation("sqrtsoftplus", "SqrtSoftplus", "sqrt(log(1 + exp(x)))", ref.sqrtsoftplus,
               exact=ref.exact_sqrtsoftplus, gradient_from_output=ref.sqrtsoftplus_from_output, work=Work(5, 5),
               transformers=("SqrtSoftplusActivation",)),

    # Backward needs x.
    Activation("gelu", "GELU", "x cdf(x), cdf of the standard normal distribution", F.gelu, module=nn.GELU,
               exact=ref.exact_gelu, variant=("approximate", {"none": "gelu", "tanh": "gelu_tanh"}), aliases=("gelu_python",),
               work=Work(4, 5), transformers=("GELUActivation",)),
    Activation("gelu_tanh", "GELUTanh", "x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2", ref.gelu_tanh,
               exact=ref.exact_gelu_tanh,
               aliases=("gelu_new", "new_gelu", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
               work=Work(5, 1), transformers=("AccurateGELUActivation", "FastGELUActivation", "GELUTanh", "NewGELUActivation",
                                              "PytorchGELUTanh")),
    Activation("silu", "SiLU", "x sigmoid(x)", F.silu, inplace=True, module=nn.SiLU, exact=ref.exact_silu,
               aliases=("swish",), transformers=("SiLUActivation",)),
    Activation("mish", "Mish", "x tanh(softplus(x))", F.mish, inplace=True, module=nn.Mish, exact=ref.exact_mish,
               work=Work(2, 1), transformers=("MishActivation",)),
    Activation("hardswish", "Hardswish", "x clamp(x + 3, 0, 6) / 6", F.hardswish, inplace=True, module=nn.Hardswish,
               exact=ref.exact_hardswish, aliases=("hard_silu",)),
    Activation("tanhshrink", "Tanhshrink", "x - tanh(x)", F.tanhshrink, module=nn.Tanhshrink,
               exact=ref.exact_tanhshrink, work=Work(4, 1)),
    Activation("quick_gelu", "QuickGELU", "x sigmoid(1.702 x)", ref.quick_gelu, exact=ref.exact_quick_gelu,
               work=Work(2, 1), transformers=("QuickGELUActivation",)),
    Activation("gelu_10", "ClippedGELU", "clamp(gelu(x), -10, 10)", ref.gelu_10, exact=ref.exact_gelu_10,
               work=Work(4, 5), transformers=("ClippedGELUActivation",)),
    Activation("laplace", "Laplace", "(1 + erf((x - mu) / (sigma sqrt(2)))) / 2", ref.laplace,
               (("mu", 0.707107), ("sigma", 0.282095)), exact=ref.exact_laplace, requires=_positive("sigma", 1),
               work=Work(5, 1), transformers=("LaplaceActivation",)),
    Activation("snake", "Snake", "x + sin(alpha x)^2 / alpha", ref.snake, (("alpha", 1.0),),
               requires=(Requirement("alpha != 0", lambda alpha: alpha != 0),)),
    Activation("sparse_plus", "SparsePlus", "0 for x <= -1, x for x >= 1, else (x + 1)^2 / 4", ref.sparse_plus),

    # With further operands, or random numbers.
    Activation("prelu", "PReLU", "x for x > 0, else weight x; one weight, or one for each channel, is learned", ref.prelu,
               module=nn.PReLU, channels={"weight": Channel(0.25, dim=1)}, dtypes="same", work=Work(1, 4),
               in_python={"weight": "torch.full((num_parameters,), init, device=device, dtype=dtype)"},
               notes="Backward keeps x, which the weight's gradient needs; one bit per element where the weight has none."),
    Activation("rrelu", "RReLU",
               "x for x > 0, else slope x; in training a random slope for each element, else the mean of lower and upper",
               ref.rrelu, (("lower", 1 / 8), ("upper", 1 / 3)), inplace=True, module=nn.RReLU, declared_saves=("bit",),
               work=Work(3, 1),
               requires=(Requirement("-inf < lower <= upper < inf", lambda low, high: -math.inf < low <= high < math.inf),),
               spans=("upper - lower", lambda lower, upper: upper - lower),
               in_eval=lambda lower, upper: (library["leaky_relu"], (lower / 2 + upper / 2,)),
               in_python=dict.fromkeys(("lower", "upper"), "(self.lower + self.upper) / 2"),
               notes="Slopes follow from torch.manual_seed and from the place of an element in memory: inputs that lie alike "
                     "get the same, on a CPU and on a GPU, if their dtypes are of one size.\n"
                     "They are made again in backward, from 8 bytes that PyTorch's generator drew; no noise is kept."),
    Activation("xielu", "XIELU", "p x^2 + beta x for x > 0, else (n + beta) (exp(min(x, eps)) - 1 - x) + beta x; "
               "p = softplus(alpha_p) and n = softplus(alpha_n) are learned", ref.xielu, module=ref.XIELU,
               exact=ref.exact_xielu, aliases=("xielu_activation",), zero_crossing=0.5, work=Work(4, 4), dtypes="promoted",
               channels={"alpha_p": Channel(math.log(math.expm1(0.8)), one=True),
                         "alpha_n": Channel(math.log(math.expm1(0.3)), one=True),
                         "beta": Channel(0.5, one=True), "eps": Channel(-1e-6, one=True)}, transformers=("XIELUActivation",),
               in_python={"alpha_p": "torch.tensor([math.log(math.expm1(alpha_p_init))], dtype=dtype)",
                          "alpha_n": "torch.tensor([math.log(math.expm1(alpha_n_init - beta))], dtype=dtype)",
                          "beta": "torch.tensor(beta, dtype=dtype)", "eps": "torch.tensor(eps, dtype=dtype)"},
               notes="Gradients are those of transformers' formula; between eps and 0, both included, that is -n. At -inf this "
                     "is the limit, inf, where the formula is NaN."),

    # Gated: of two tensors, or of one tensor that holds both.
    Activation("swiglu", "SwiGLU", "silu(gate) up", gates.swiglu, exact=gates.exact_swiglu, aliases=("silu_and_mul",),
               gating=Gating(of="silu"), work=Work(2, 2)),
    Activation("geglu", "GEGLU", "gelu(gate) up", gates.geglu, exact=gates.exact_geglu, aliases=("gelu_and_mul",),
               gating=Gating(of="gelu"), work=Work(3, 3)),
    Activation("geglu_tanh", "GEGLUTanh", "gelu_tanh(gate) up", gates.geglu_tanh, exact=gates.exact_geglu_tanh,
               aliases=("gelu_tanh_and_mul",), gating=Gating(of="gelu_tanh"), work=Work(3, 3)),
    Activation("reglu", "ReGLU", "max(gate, 0) up", gates.reglu, aliases=("relu_and_mul",), gating=Gating(of="relu")),
    Activation("glu", "GLU", "up sigmoid(gate), the gate last", gates.glu, module=nn.GLU, exact=gates.exact_glu,
               gating=Gating("last"), work=Work(2, 2)),
    Activation("bilinear", "Bilinear", "gate up", gates.bilinear, gating=Gating()),
    Activation("sreglu", "SReGLU", "max(gate, 0)^2 up", gates.sreglu, gating=Gating(of="relu2")),
    Activation("quick_geglu", "QuickGEGLU", "gate sigmoid(1.702 gate) up", gates.quick_geglu, exact=gates.exact_quick_geglu,
               aliases=("quick_gelu_and_mul",), gating=Gating(of="quick_gelu"), work=Work(2, 2)),
    Activation("fatrelu_glu", "FATReLUGLU", "gate up for gate > threshold, else 0", gates.fatrelu_glu,
               params=(("threshold", 0.0),), aliases=("fatrelu_and_mul",), gating=Gating()),
    Activation("clamped_swiglu", "ClampedSwiGLU",
               "g sigmoid(alpha g) (u + beta), where g = min(gate, limit) and u = clamp(up, -limit, limit)",
               gates.clamped_swiglu, params=(("alpha", 1.702), ("limit", 7.0), ("beta", 1.0)), exact=gates.exact_clamped_swiglu,
               requires=(Requirement("alpha > 0", lambda alpha, limit, beta: alpha > 0),
                         Requirement("limit >= 0", lambda alpha, limit, beta: limit >= 0)), gating=Gating(), work=Work(2, 2),
               notes="The defaults are gpt-oss'; alpha=1, beta=0 is DeepSeek's, and with limit=inf it is swiglu."),
    Activation("swiglu_step", "SwiGLUStep", "min(silu(gate), limit) clamp(up, -limit, limit)", gates.swiglu_step,
               params=(("limit", 7.0),), exact=gates.exact_swiglu_step, aliases=("swiglustep_and_mul",),
               requires=(Requirement("limit >= 0", lambda limit: limit >= 0),), gating=Gating(), work=Work(2, 2)),
    Activation("situ_glu", "SiTUGLU", "c(gate, beta) sigmoid(gate) c(up, beta2), where c(x, b) = b tanh(x / b)",
               gates.situ_glu, params=(("beta", 4.0), ("beta2", 25.0)), exact=gates.exact_situ_glu, aliases=("situ_and_mul",),
               requires=(Requirement("beta >= 1.2e-38", lambda beta, beta2: beta >= TINY),
                         Requirement("beta2 = 0 or beta2 >= 1.2e-38", lambda beta, beta2: beta2 == 0 or beta2 >= TINY)),
               gating=Gating(), work=Work(5, 4),
               notes="With beta2=0, up is not capped."),
)

TABLE += (
    _preset("mul_and_silu", "MulAndSiLU", "up silu(gate), the gate last", "swiglu", gate="last"),
    _preset("swigluoai_and_mul", "SwiGLUOAIAndMul", "clamped_swiglu, interleaved", "clamped_swiglu", layout="interleaved"),
)
# fmt: on
