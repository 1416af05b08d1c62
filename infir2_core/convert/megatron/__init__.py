"""Megatron-core's torch_dist checkpoints, and the launch scripts around them, read and written without Megatron."""
