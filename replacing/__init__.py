"""Replaces PyTorch's activations in models by jitact's, and restores them."""
