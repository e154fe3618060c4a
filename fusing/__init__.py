"""What stands around an activation, in the same kernel: bias, dropout, residual."""
