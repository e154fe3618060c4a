#include "rows.cuh"

// softmax(x)_i = exp(x_i) / sum_j exp(x_j)
// Its gradient is y_i (dy_i - sum_j dy_j y_j).
// Source: torch.nn.Softmax.

ELEMENTWISE T forward(T kept, SumOfExp<T> row) { return row.share(kept); }

ELEMENTWISE T fold_from_output(T dy, T y) { return dy * y; }

ELEMENTWISE T backward_from_output(T dy, T y, Sum<T> row) { return y * (dy - row.total); }
