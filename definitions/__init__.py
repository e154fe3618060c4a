"""Activations that users define: as expressions, as kernel files, and as folders of kernel files."""
