"""Fused kernels of others: cuDNN, tokamax, and JAX's own Pallas kernels for TPUs."""
