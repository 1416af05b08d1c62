"""Engines run a model: `native` (CPU, one GPU, data-parallel ranks of one box)."""
