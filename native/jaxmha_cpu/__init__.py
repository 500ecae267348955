"""The native CPU kernels of `jaxmha`, which finds, checks and registers them when it needs them.

To import this package registers them at once: a program that another process compiled, and that is
loaded by `jax.experimental.serialize_executable`, calls them without `jaxmha`.

Raises:
  ImportError: this process cannot use them; the message says why.
"""

from jaxmha.implementations.native import library

if (_reason := library.unavailable()) is not None:
    raise ImportError(_reason)
