#include "gated.cuh"

// sreglu(gate, up) = max(gate, 0)^2 up
// by gate 2 max(gate, 0) up, by up max(gate, 0)^2
// Source: TransformerEngine's srelu in a gated unit; So et al., Primer (2021).

ELEMENTWISE T forward(T gate, T up) {
  if constexpr (kUnfused) return rounded(relu2_::forward(gate)) * up;
  const T r = relu_::forward(gate);
  return product(r, up, r);  // the square alone may overflow
}

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {
  const T r = relu_::forward(gate);
  if constexpr (kUnfused) return {rounded(dy * up) * (2 * r), dy * rounded(r * r)};
  return {2 * product(dy, up, r), product(dy, r, r)};
}
