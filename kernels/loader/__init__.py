"""From sources to operators: what :mod:`jitact.kernels` describes."""
