"""Calls for tensors of other classes: jagged nested tensors, and DTensors."""
