"""Kernels and library calls for Hopper GPUs; each has its definition in ops/reference."""
