"""PyTorch's activations in a model, replaced by these and restored."""
