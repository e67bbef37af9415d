"""Weights that stay plain: they are quantized at each use."""
