#include "elementwise.cuh"

// threshold(x)  = x for x > threshold, else value
// threshold'(x) = 1 for x > threshold, else 0 (0 at the step, 1 for NaN)
// Source: torch.nn.Threshold.

ELEMENTWISE T forward(T x, Number<T> threshold, Number<T> value) { return select(x <= threshold, value, x); }

ELEMENTWISE bool keeps(T x, Number<T> threshold, Number<T>) { return !(x <= threshold); }

ELEMENTWISE T backward_from_bit(T dy, bool above, Number<T>, Number<T>) { return above ? dy : 0; }
