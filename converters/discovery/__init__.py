"""Attention blocks, other layers, head counts and behaviour, found in tensors and next to them."""
