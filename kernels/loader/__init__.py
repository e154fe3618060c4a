"""Builds and loads kernels; :mod:`jitact.kernels` gives an overview of the modules."""
