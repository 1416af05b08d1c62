"""Training: the loop, checkpoints, metrics, stop requests and fault points.

Importing this package costs nothing; `metrics`, `manifest`, `stop` and `fault_points` need no torch, so that the
commands which only read run folders stay quick.
"""
