"""jaxmha inside Keras: its own attention layers compute with jaxmha, on the JAX backend.

`with jaxmha.keras.use():` for a part of a program, `jaxmha.keras.use()` for the rest of it.
"""

from jaxmha.keras.switch import VERSIONS as VERSIONS
from jaxmha.keras.switch import Switch as Switch
from jaxmha.keras.switch import use as use

__all__ = ["VERSIONS", "Switch", "use"]
