"""Activations as one file that needs torch alone."""
