"""Finds attention blocks, other layers, head counts and behaviour of a checkpoint or model."""
