"""Bias, dropout and residual, fused with an activation in one kernel."""
