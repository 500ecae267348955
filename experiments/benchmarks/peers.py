"""Who is compared. Nothing of theirs is imported here."""

from importlib.util import find_spec
from typing import NamedTuple


class Peer(NamedTuple):
    """What it is, the packages it needs, and the backend that Keras is to run on."""

    about: str
    packages: tuple[str, ...]
    keras_backend: str = "jax"

    @property
    def absent(self) -> str | None:
        """What is not installed, or None."""
        missing = [package for package in self.packages if find_spec(package) is None]
        return f"not installed: {', '.join(missing)}" if missing else None


PEERS: dict[str, Peer] = {
    "jaxmha": Peer("jaxmha.multi_head_attention, dot_product_attention", ("jax",)),
    "torch-sdpa": Peer("nn.MultiheadAttention, need_weights=False, fast path off", ("torch",)),
    "torch-native": Peer("nn.MultiheadAttention on its native fast path", ("torch",)),
    "torch-weights": Peer("nn.MultiheadAttention, need_weights=True, fast path off", ("torch",)),
    "keras-tf": Peer(
        "Keras on TensorFlow, under tf.function", ("keras", "tensorflow"), "tensorflow"
    ),
    "keras-jax": Peer("Keras on JAX, under jit", ("keras", "jax")),
    "flax-linen": Peer("flax.linen.MultiHeadDotProductAttention, under jit", ("flax",)),
    "flax-nnx": Peer("flax.nnx.MultiHeadAttention, under jit", ("flax",)),
    "jax-nn": Peer("jax.nn.dot_product_attention between einsums, under jit", ("jax",)),
}
OURS = "jaxmha"
# The fastest of these is the fastest that JAX users have.
ON_JAX = ("keras-jax", "flax-linen", "flax-nnx", "jax-nn")
