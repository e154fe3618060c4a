#include "elementwise.cuh"

// selu(x)  = S * x for x > 0, else S * A * (exp(x) - 1)
// selu'(x) = S     for x > 0, else S * A * exp(x) = y + S * A
// Source: torch.nn.SELU; Klambauer et al., Self-Normalizing Neural Networks (2017), which gives S and A.

#define SELU_SCALE 1.0507009873554804934193349852946
#define SELU_ALPHA 1.6732632423543772848170429916717
#define SELU_SCALE_ALPHA (SELU_SCALE * SELU_ALPHA)

#ifdef JITACT_FAST_MATH
// Branch-free, with exp(x) - 1 in place of expm1(x): absolute error up to 2e-7 near 0, which is a large relative one there.
ELEMENTWISE T forward(T x) { return SELU_SCALE * max(x, 0) + SELU_SCALE_ALPHA * (exp(min(x, 0)) - 1); }
#else
ELEMENTWISE T forward(T x) { return select(x > 0, SELU_SCALE * x, SELU_SCALE_ALPHA * expm1(x)); }
#endif

ELEMENTWISE T backward(T dy, T x) { return dy * select(x > 0, T(SELU_SCALE), SELU_SCALE_ALPHA * exp(x)); }

ELEMENTWISE T backward_from_output(T dy, T y) { return dy * select(y > 0, T(SELU_SCALE), y + SELU_SCALE_ALPHA); }
