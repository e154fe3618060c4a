#include "capped.cuh"

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
ELEMENTWISE T forward(T gate, T up, Number<T> beta, Number<T> beta2) { return capped_product<T>(gate, up, beta, beta2); }

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up, Number<T> beta, Number<T> beta2) {
  return capped_gradients<T>(dy, gate, up, beta, beta2);
}
#endif
