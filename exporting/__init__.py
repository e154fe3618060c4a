"""Exports an activation as a single file that depends on torch only."""
