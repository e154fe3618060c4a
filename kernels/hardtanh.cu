#include "elementwise.cuh"

// hardtanh(x)  = clamp(x, min_val, max_val)
// hardtanh'(x) = 1 for min_val < x < max_val, else 0 (0 at both kinks, 1 for NaN)
// Source: torch.nn.Hardtanh.

ELEMENTWISE T forward(T x, Number<T> min_val, Number<T> max_val) {
  return x < min_val ? min_val : x > max_val ? max_val : x;  // not clamp or min, which on a GPU tell -0 from 0
}

ELEMENTWISE bool keeps(T x, Number<T> min_val, Number<T> max_val) { return !(x <= min_val || x >= max_val); }

ELEMENTWISE T backward_from_bit(T dy, bool inside, Number<T>, Number<T>) { return inside ? dy : 0; }
