"""Gated activations, ``act(gate) * up``, of two tensors or of one that holds both."""
