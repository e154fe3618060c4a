#include "elementwise.cuh"

// gelu_tanh(x)  = x (1 + tanh(u)) / 2 = x sigmoid(2 u), with 2 u = x (k1 + k3 x^2)
// gelu_tanh'(x) = sigmoid(2 u) + x sigmoid'(2 u) (k1 + 3 k3 x^2)
// Source: torch.nn.GELU(approximate="tanh"): u = sqrt(2 / pi) (x + 0.044715 x^3). The limit at -inf is -0.

#define GELU_TANH_K1 1.5957691216057308  // 2 sqrt(2 / pi)
#define GELU_TANH_K3 (0.044715 * GELU_TANH_K1)
// The same, times log2(e): for powers of two in place of exponentials.
#define GELU_TANH_B1 2.3022081981443248
#define GELU_TANH_B3 0.1029432395800235
#define GELU_TANH_NEAR_B1 2.30220794677734375  // 301755 / 2^17: a float's difference to it is exact, from B1 to 128

// From |x| = 40 on both are constant in every type.
ELEMENTWISE T forward(T x) {
  // A power turns absolute errors of the exponent into relative ones, so what rounding takes is kept.
  const T t = min(folded(x), 40), u = t * t, w = fma(T(GELU_TANH_B3), u, T(GELU_TANH_B1));
  const T rests = fma(rest(T(GELU_TANH_B3), GELU_TANH_B3), u, T(GELU_TANH_B1 - GELU_TANH_NEAR_B1));
  const T w_low = fma(T(GELU_TANH_B3), u, GELU_TANH_NEAR_B1 - w) + fma(T(GELU_TANH_B3), fma(t, t, -u), rests);
  return x_times_sigmoid(x, t, w, w_low);
}

// exp(-|2 u|), and the slope from it and r = 1 / (1 + exp(-|2 u|)).
ELEMENTWISE T fall(T x) {
  const T t = min(folded(x), 40), u = t * t;
  return decay(t * (GELU_TANH_K3 * u + GELU_TANH_K1));
}
ELEMENTWISE T slope(T x, T e, T r) {
  const T t = min(folded(x), 40), u = t * t, s = t * (3 * GELU_TANH_K3 * u + GELU_TANH_K1) * r;
  return r * select(x < 0, e * (1 - s), 1 + s * e);
}

ELEMENTWISE T backward(T dy, T x) {
  const T e = fall<T>(x), r = reciprocal(1 + e);
  return dy * slope<T>(x, e, r);
}
