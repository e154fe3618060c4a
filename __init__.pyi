# Written by `jitact report` from the table of activations and the public functions; tests compare it. Not to be edited.

from typing import Literal

from torch import Tensor

from .compiling.programs import load_operators as load_operators
from .definitions.define import define as define
from .definitions.define import load_folder as load_folder
from .definitions.define import save_folder as save_folder
from .exporting.onefile import export as export
from .gating.generated import gated as gated
from .measuring.checks import check as check
from .plots import plot as plot
from .records import Channel as Channel
from .records import Row as Row
from .registry import REGISTRY as REGISTRY
from .registry import get as get
from .registry import names as names
from .replacing.swap import patched as patched
from .replacing.swap import replace as replace
from .replacing.swap import restore as restore
from .rows import log_softmax as log_softmax
from .rows import softmax as softmax
from .rows import softmin as softmin

__version__: str
__all__ = [
    "REGISTRY", "Channel", "Row", "bilinear", "celu", "check", "clamped_swiglu", "define", "elu", "export",
    "fatrelu_glu", "gated", "geglu", "geglu_tanh", "gelu", "gelu_10", "gelu_tanh", "get", "glu", "hardshrink",
    "hardsigmoid", "hardswish", "hardtanh", "laplace", "leaky_relu", "load_folder", "load_operators", "log_softmax",
    "logsigmoid", "mish", "names", "patched", "plot", "prelu", "quick_geglu", "quick_gelu", "reglu", "relu", "relu2",
    "relu6", "replace", "restore", "rrelu", "save_folder", "selu", "sigmoid", "silu", "situ_glu", "snake", "softcap",
    "softmax", "softmin", "softplus", "softshrink", "softsign", "sparse_plus", "sparse_sigmoid", "sqrtsoftplus",
    "squareplus", "sreglu", "swiglu", "swiglu_step", "tanh", "tanhshrink", "threshold", "xielu",
]

def bilinear(x: Tensor | None = None, other: Tensor | None = None, *, gate: Literal["first", "last"] | Tensor = "first", up: Tensor | None = None, row_weight: Tensor | None = None, dim: int = -1, layout: Literal["halves", "interleaved"] = "halves", rounding: Literal["once", "unfused"] = "once", save: Literal["input"] | None = None, fast_math: bool = False) -> Tensor:
    """bilinear(x) = gate up"""

def celu(x: Tensor, alpha: float = 1.0, inplace: bool = False, *, save: Literal["input", "output"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """celu(x) = max(x, 0) + min(alpha (exp(x / alpha) - 1), 0)"""

def clamped_swiglu(x: Tensor | None = None, other: Tensor | None = None, *, gate: Literal["first", "last"] | Tensor = "first", up: Tensor | None = None, row_weight: Tensor | None = None, dim: int = -1, alpha: float = 1.702, limit: float = 7.0, beta: float = 1.0, layout: Literal["halves", "interleaved"] = "halves", rounding: Literal["once", "unfused"] = "once", save: Literal["input"] | None = None, fast_math: bool = False) -> Tensor:
    """clamped_swiglu(x) = g sigmoid(alpha g) (u + beta), where g = min(gate, limit) and u = clamp(up, -limit, limit)"""

def elu(x: Tensor, alpha: float = 1.0, inplace: bool = False, *, save: Literal["input", "output"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """elu(x) = x for x > 0, else alpha (exp(x) - 1)"""

def fatrelu_glu(x: Tensor | None = None, other: Tensor | None = None, *, gate: Literal["first", "last"] | Tensor = "first", up: Tensor | None = None, row_weight: Tensor | None = None, dim: int = -1, threshold: float = 0.0, layout: Literal["halves", "interleaved"] = "halves", rounding: Literal["once", "unfused"] = "once", save: Literal["input"] | None = None, fast_math: bool = False) -> Tensor:
    """fatrelu_glu(x) = gate up for gate > threshold, else 0"""

fatrelu_and_mul = fatrelu_glu

def geglu(x: Tensor | None = None, other: Tensor | None = None, *, gate: Literal["first", "last"] | Tensor = "first", up: Tensor | None = None, row_weight: Tensor | None = None, dim: int = -1, layout: Literal["halves", "interleaved"] = "halves", rounding: Literal["once", "unfused"] = "once", save: Literal["input"] | None = None, fast_math: bool = False) -> Tensor:
    """geglu(x) = gelu(gate) up"""

gelu_and_mul = geglu

def geglu_tanh(x: Tensor | None = None, other: Tensor | None = None, *, gate: Literal["first", "last"] | Tensor = "first", up: Tensor | None = None, row_weight: Tensor | None = None, dim: int = -1, layout: Literal["halves", "interleaved"] = "halves", rounding: Literal["once", "unfused"] = "once", save: Literal["input"] | None = None, fast_math: bool = False) -> Tensor:
    """geglu_tanh(x) = gelu_tanh(gate) up"""

gelu_tanh_and_mul = geglu_tanh

def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none", *, save: Literal["input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """gelu(x) = x cdf(x), cdf of the standard normal distribution"""

gelu_python = gelu

def gelu_10(x: Tensor, *, save: Literal["input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """gelu_10(x) = clamp(gelu(x), -10, 10)"""

def gelu_tanh(x: Tensor, *, save: Literal["input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """gelu_tanh(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2"""

gelu_new = gelu_tanh
new_gelu = gelu_tanh
gelu_fast = gelu_tanh
gelu_accurate = gelu_tanh
gelu_pytorch_tanh = gelu_tanh
gelu_python_tanh = gelu_tanh

def glu(x: Tensor | None = None, other: Tensor | None = None, *, gate: Literal["first", "last"] | Tensor = "last", up: Tensor | None = None, row_weight: Tensor | None = None, dim: int = -1, layout: Literal["halves", "interleaved"] = "halves", rounding: Literal["once", "unfused"] = "once", save: Literal["input"] | None = None, fast_math: bool = False) -> Tensor:
    """glu(x) = up sigmoid(gate), the gate last"""

def hardshrink(x: Tensor, lambd: float = 0.5, *, save: Literal["bit", "input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """hardshrink(x) = 0 for |x| <= lambd, else x"""

def hardsigmoid(x: Tensor, inplace: bool = False, *, save: Literal["bit", "input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """hardsigmoid(x) = clamp(x + 3, 0, 6) / 6"""

def hardswish(x: Tensor, inplace: bool = False, *, save: Literal["input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """hardswish(x) = x clamp(x + 3, 0, 6) / 6"""

hard_silu = hardswish

def hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False, *, save: Literal["bit", "input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """hardtanh(x) = clamp(x, min_val, max_val)"""

def laplace(x: Tensor, mu: float = 0.707107, sigma: float = 0.282095, *, save: Literal["input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """laplace(x) = (1 + erf((x - mu) / (sigma sqrt(2)))) / 2"""

def leaky_relu(x: Tensor, negative_slope: float = 0.01, inplace: bool = False, *, save: Literal["bit", "input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """leaky_relu(x) = x for x > 0, else negative_slope x"""

def logsigmoid(x: Tensor, *, save: Literal["input", "output"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """logsigmoid(x) = -log(1 + exp(-x))"""

def mish(x: Tensor, inplace: bool = False, *, save: Literal["input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """mish(x) = x tanh(softplus(x))"""

def prelu(x: Tensor, weight: Tensor, *, save: Literal["bit", "input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """prelu(x) = x for x > 0, else weight x; one weight, or one for each channel, is learned"""

def quick_geglu(x: Tensor | None = None, other: Tensor | None = None, *, gate: Literal["first", "last"] | Tensor = "first", up: Tensor | None = None, row_weight: Tensor | None = None, dim: int = -1, layout: Literal["halves", "interleaved"] = "halves", rounding: Literal["once", "unfused"] = "once", save: Literal["input"] | None = None, fast_math: bool = False) -> Tensor:
    """quick_geglu(x) = gate sigmoid(1.702 gate) up"""

quick_gelu_and_mul = quick_geglu

def quick_gelu(x: Tensor, *, save: Literal["input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """quick_gelu(x) = x sigmoid(1.702 x)"""

def reglu(x: Tensor | None = None, other: Tensor | None = None, *, gate: Literal["first", "last"] | Tensor = "first", up: Tensor | None = None, row_weight: Tensor | None = None, dim: int = -1, layout: Literal["halves", "interleaved"] = "halves", rounding: Literal["once", "unfused"] = "once", save: Literal["input"] | None = None, fast_math: bool = False) -> Tensor:
    """reglu(x) = max(gate, 0) up"""

relu_and_mul = reglu

def relu(x: Tensor, inplace: bool = False, *, save: Literal["bit", "input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """relu(x) = max(x, 0)"""

def relu2(x: Tensor, *, save: Literal["input", "output"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """relu2(x) = max(x, 0)^2"""

squared_relu = relu2

def relu6(x: Tensor, inplace: bool = False, *, save: Literal["bit", "input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """relu6(x) = clamp(x, 0, 6)"""

def rrelu(x: Tensor, lower: float = 0.125, upper: float = 0.3333333333333333, training: bool = False, inplace: bool = False, *, save: Literal["bit"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """rrelu(x) = x for x > 0, else slope x; in training a random slope for each element, else the mean of lower and upper"""

def selu(x: Tensor, inplace: bool = False, *, save: Literal["input", "output"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """selu(x) = S x for x > 0, else S A (exp(x) - 1); S = 1.0507..., A = 1.6732..."""

def sigmoid(x: Tensor, *, save: Literal["output", "input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """sigmoid(x) = 1 / (1 + exp(-x))"""

def silu(x: Tensor, inplace: bool = False, *, save: Literal["input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """silu(x) = x sigmoid(x)"""

swish = silu

def situ_glu(x: Tensor | None = None, other: Tensor | None = None, *, gate: Literal["first", "last"] | Tensor = "first", up: Tensor | None = None, row_weight: Tensor | None = None, dim: int = -1, beta: float = 4.0, beta2: float = 25.0, layout: Literal["halves", "interleaved"] = "halves", rounding: Literal["once", "unfused"] = "once", save: Literal["input"] | None = None, fast_math: bool = False) -> Tensor:
    """situ_glu(x) = c(gate, beta) sigmoid(gate) c(up, beta2), where c(x, b) = b tanh(x / b)"""

situ_and_mul = situ_glu

def snake(x: Tensor, alpha: float = 1.0, *, save: Literal["input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """snake(x) = x + sin(alpha x)^2 / alpha"""

def softcap(x: Tensor, c: float = 30.0, *, save: Literal["input", "output"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """softcap(x) = c tanh(x / c)"""

def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0, *, save: Literal["input", "output"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """softplus(x) = log(1 + exp(beta x)) / beta, x where beta x > threshold"""

def softshrink(x: Tensor, lambd: float = 0.5, *, save: Literal["bit", "input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """softshrink(x) = x - clamp(x, -lambd, lambd)"""

def softsign(x: Tensor, *, save: Literal["input", "output"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """softsign(x) = x / (1 + |x|)"""

def sparse_plus(x: Tensor, *, save: Literal["input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """sparse_plus(x) = 0 for x <= -1, x for x >= 1, else (x + 1)^2 / 4"""

def sparse_sigmoid(x: Tensor, *, save: Literal["bit", "input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """sparse_sigmoid(x) = clamp((x + 1) / 2, 0, 1)"""

def sqrtsoftplus(x: Tensor, *, save: Literal["input", "output"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """sqrtsoftplus(x) = sqrt(log(1 + exp(x)))"""

def squareplus(x: Tensor, b: float = 4.0, *, save: Literal["input", "output"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """squareplus(x) = (x + sqrt(x^2 + b)) / 2"""

def sreglu(x: Tensor | None = None, other: Tensor | None = None, *, gate: Literal["first", "last"] | Tensor = "first", up: Tensor | None = None, row_weight: Tensor | None = None, dim: int = -1, layout: Literal["halves", "interleaved"] = "halves", rounding: Literal["once", "unfused"] = "once", save: Literal["input"] | None = None, fast_math: bool = False) -> Tensor:
    """sreglu(x) = max(gate, 0)^2 up"""

def swiglu(x: Tensor | None = None, other: Tensor | None = None, *, gate: Literal["first", "last"] | Tensor = "first", up: Tensor | None = None, row_weight: Tensor | None = None, dim: int = -1, layout: Literal["halves", "interleaved"] = "halves", rounding: Literal["once", "unfused"] = "once", save: Literal["input"] | None = None, fast_math: bool = False) -> Tensor:
    """swiglu(x) = silu(gate) up"""

silu_and_mul = swiglu

def swiglu_step(x: Tensor | None = None, other: Tensor | None = None, *, gate: Literal["first", "last"] | Tensor = "first", up: Tensor | None = None, row_weight: Tensor | None = None, dim: int = -1, limit: float = 7.0, layout: Literal["halves", "interleaved"] = "halves", rounding: Literal["once", "unfused"] = "once", save: Literal["input"] | None = None, fast_math: bool = False) -> Tensor:
    """swiglu_step(x) = min(silu(gate), limit) clamp(up, -limit, limit)"""

swiglustep_and_mul = swiglu_step

def tanh(x: Tensor, *, save: Literal["output", "input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """tanh(x) = tanh(x)"""

def tanhshrink(x: Tensor, *, save: Literal["input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """tanhshrink(x) = x - tanh(x)"""

def threshold(x: Tensor, threshold: float = 0.1, value: float = 20.0, inplace: bool = False, *, save: Literal["bit", "input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """threshold(x) = x for x > threshold, else value"""

def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-06, *, save: Literal["input"] | None = None, fast_math: bool = False, bias: Tensor | None = None, dropout: float = 0.0, residual: Tensor | None = None, channel_dim: int = -1, seed: Tensor | None = None) -> Tensor:
    """xielu(x) = p x^2 + beta x for x > 0, else (n + beta) (exp(min(x, eps)) - 1 - x) + beta x; p = softplus(alpha_p) and n = softplus(alpha_n) are learned"""

xielu_activation = xielu
