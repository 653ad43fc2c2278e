"""Gradients that travel compressed: what strategies with buckets do with them."""
