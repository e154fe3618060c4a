"""Activations inside torch.compile and torch.export: kernel files read as torch operations, and operators for graphs."""
