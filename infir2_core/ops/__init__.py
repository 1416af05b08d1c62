"""How arithmetic is done: quantise, multiply, normalise. Sees specs and tensors, never a recipe, a config or a layer
name.
"""
