"""Attention in C++ on CPUs, through XLA's FFI; the library is the distribution `jaxmha-cpu`."""
