#include "gated.cuh"

// situ_glu(gate, up) = c(gate, beta) sigmoid(gate) c(up, beta2), with c(x, b) = b tanh(x / b), and c(x, 0) = x for up
// by gate s ((1 - t^2) + beta t (1 - s)) c(up, beta2), with s = sigmoid(gate) and t = tanh(gate / beta);
// by up c(gate, beta) s (1 - tanh(up / beta2)^2)
// Source: Kimi K3; SGLang's SituAndMul, with beta = 4 and beta2 = 25.

#ifdef JITACT_UNFUSED
ELEMENTWISE T forward(T gate, T up, Number<T> beta, Number<T> beta2) {
  const T a = rounded(beta * rounded(tanh(rounded(divided<T>(gate, beta)))));
  const T w = rounded(beta2 * rounded(tanh(rounded(divided<T>(up, beta2)))));
  return rounded(a * rounded(sigmoid(gate))) * select(beta2 == 0, up, w);
}

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up, Number<T> beta, Number<T> beta2) {
  const T t = rounded(tanh(rounded(divided<T>(gate, beta)))), t2 = rounded(tanh(rounded(divided<T>(up, beta2))));
  const T a = rounded(beta * t), s = rounded(sigmoid(gate)), w = select(beta2 == 0, up, rounded(beta2 * t2));
  const T dh = rounded(dy * w), dw = rounded(dy * rounded(a * s));
  const T by_gate = rounded(divided<T>(by_tanh<T>(rounded(rounded(dh * s) * beta), t), beta));
  const T by_up = divided<T>(by_tanh<T>(rounded(dw * beta2), t2), beta2);
  return {by_gate + by_sigmoid<T>(rounded(dh * a), s), select(beta2 == 0, dw, by_up)};
}
#else
// t is tanh(x / c). x / c may be too small for a T where x is not.
ELEMENTWISE T capped(T x, T c, T t) { return select(abs(x) < 0x1p-100 * c, x, c * t); }
// (1 - t)(1 + t), by whichever form loses less.
ELEMENTWISE T tanh_slope(T q, T t) {
  const T e = decay(2 * abs(q)), r = one_over_one_plus<T>(e);
  return select(abs(t) < 0.7, fma(-t, t, 1), 4 * e * r * r);
}
ELEMENTWISE T act(T gate, T beta, T t) { return times_sigmoid(capped<T>(gate, beta, t), max(gate, -1000)); }

ELEMENTWISE T forward(T gate, T up, Number<T> beta, Number<T> beta2) {
  const bool tiny = abs(gate) < 0x1p-100 * beta, tiny2 = abs(up) < 0x1p-100 * beta2;
  const T s = times_sigmoid(select(tiny, 1, beta), max(gate, -1000)), t = select(tiny, gate, tanh(quotient<T>(gate, beta)));
  const T q = quotient<T>(up, beta2), t2 = tanh(q);
  const T factor = select(beta2 == 0, 1, select(tiny2, 1, beta2)), of = select(beta2 == 0, up, select(tiny2, up, t2));
  // What rounding takes from the quotient changes the tanh by its slope.
  const T lost = fma(-q, beta2, up) * one_over(beta2) * fma(-t2, t2, 1);
  return product<T>(s, t, factor, of, select(beta2 == 0, 0, select(tiny2, 0, select(abs(q) < 16, lost, 0))));
}

// 1 - s is sigmoid(-gate), so that it does not cancel.
ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up, Number<T> beta, Number<T> beta2) {
  const T q = quotient<T>(gate, beta), t = tanh(q), q2 = quotient<T>(up, beta2), t2 = tanh(q2);
  const T slope = times_sigmoid(fma(capped<T>(gate, beta, t), sigmoid(-gate), tanh_slope<T>(q, t)), max(gate, -1000));
  const T by_gate = product<T>(dy, select(beta2 == 0, up, capped<T>(up, beta2, t2)), slope);
  return {by_gate, product<T>(dy, act<T>(gate, beta, t), select(beta2 == 0, 1, tanh_slope<T>(q2, t2)))};
}
#endif
