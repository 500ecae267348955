"""Fused kernels of others, behind one adapter."""
