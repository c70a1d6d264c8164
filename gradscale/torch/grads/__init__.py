"""Gradients: which there are, and what is measured of and done to them."""
