#include "gated.cuh"

// sreglu(gate, up) = max(gate, 0)^2 up
// by gate 2 max(gate, 0) up, by up max(gate, 0)^2
// Source: TransformerEngine's srelu in a gated unit; So et al., Primer (2021).

#ifdef JITACT_UNFUSED
ELEMENTWISE T forward(T gate, T up) { return rounded(relu2_::forward(gate)) * up; }

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {
  return {relu2_::backward(rounded(dy * up), gate), dy * rounded(relu2_::forward(gate))};
}
#else
// The square alone may overflow.
ELEMENTWISE T forward(T gate, T up) {
  const T r = relu_::forward(gate);
  return product(r, up, r);
}

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {
  const T r = relu_::forward(gate);
  return {2 * product(dy, up, r), product(dy, r, r)};
}
#endif
