"""The definition of every operation in plain torch, for any device. Kernels elsewhere are tested against this, bit
for bit.
"""
