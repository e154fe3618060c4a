#include "rows.cuh"

// log_softmax(x)_i = x_i - log(sum_j exp(x_j))
// Its gradient is dy_i - exp(y_i) sum_j dy_j.
// Source: torch.nn.LogSoftmax.

ELEMENTWISE T forward(T kept, LogSumExp<T> row) { return row.log_share(kept); }

ELEMENTWISE T fold_from_output(T dy, T) { return dy; }

ELEMENTWISE T backward_from_output(T dy, T y, Sum<T> row) { return dy - row.times_exp(y); }
