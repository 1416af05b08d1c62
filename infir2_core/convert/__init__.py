"""Checkpoints that travel: names, shapes and files of other tools, the FP8 cast, and the check of a finished folder."""
