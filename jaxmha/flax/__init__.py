"""jaxmha for flax: modules for linen and nnx, and an `attention_fn` for flax's own modules.

Change one line: `from jaxmha.flax.linen import MultiHeadDotProductAttention`, or
`from jaxmha.flax.nnx import MultiHeadAttention`; or pass `attention_fn` to flax's own module.
"""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        "jaxmha.flax needs flax, which is not installed: pip install 'jaxmha[flax]'", name="flax"
    ) from error

from jaxmha.flax import latent as latent
from jaxmha.flax import linen as linen
from jaxmha.flax import nnx as nnx
from jaxmha.flax.function import attention_fn as attention_fn

__all__ = [
    "attention_fn",
    "latent",
    "linen",
    "nnx",
]
