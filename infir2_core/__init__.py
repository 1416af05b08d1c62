"""Library behind the `infir2` command: FP8 training of Qwen2.5-family models."""

__version__ = "0.1.0"
