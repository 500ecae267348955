"""jaxmha inside Keras: Keras' own attention layers compute with jaxmha, on the JAX backend.

`with jaxmha.keras.use():` applies to its block, `jaxmha.keras.use()` to the rest of the program.
"""

from jaxmha.keras.switch import VERSIONS as VERSIONS
from jaxmha.keras.switch import Switch as Switch
from jaxmha.keras.switch import use as use

__all__ = ["VERSIONS", "Switch", "use"]
