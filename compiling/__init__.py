"""Activations inside torch.compile and torch.export: kernel files translated to torch operations, and operators for graphs."""
