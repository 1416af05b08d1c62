"""Triton kernels and library GEMMs for Hopper, with the signatures and the numbers of `ops.reference`."""
