"""The native CPU kernels of jaxmha: a library that `jaxmha` finds and checks; nothing to import."""
