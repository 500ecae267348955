"""Third-party fused kernels behind one adapter."""
