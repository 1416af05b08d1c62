"""What is quantised, as plain data: formats, scales, specs (spec.py) and whole recipes (recipe.py). No kernels, no
torch.
"""
