"""Timed comparisons of training steps: what a step costs, what of, and how far that is from what the card can do."""
