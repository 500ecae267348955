"""The libraries that are compared. This module imports none of them."""

from importlib.util import find_spec
from typing import NamedTuple

from jaxmha.bench.case import Case


class Peer(NamedTuple):
    """An implementation to time: description, required packages, Keras backend, smallest T."""

    about: str
    packages: tuple[str, ...]
    keras_backend: str = "jax"
    least: int = 0

    def takes(self, case: Case) -> bool:
        """True if this peer is timed on the case: T is at least `least`."""
        return self.least <= case.T

    @property
    def absent(self) -> str | None:
        """A message that names the missing packages; None if all are installed."""
        missing = [package for package in self.packages if find_spec(package) is None]
        return f"not installed: {', '.join(missing)}" if missing else None


PEERS: dict[str, Peer] = {
    "jaxmha": Peer("jaxmha.multi_head_attention, dot_product_attention", ("jax",)),
    "torch-sdpa": Peer(
        "nn.MultiheadAttention, eager, need_weights=False, fast path off", ("torch",)
    ),
    "torch-native": Peer("nn.MultiheadAttention, eager, on its native fast path", ("torch",)),
    "torch-weights": Peer(
        "nn.MultiheadAttention, eager, need_weights=True, fast path off", ("torch",)
    ),
    "keras-tf": Peer(
        "Keras on TensorFlow, under tf.function", ("keras", "tensorflow"), "tensorflow"
    ),
    "keras-jax": Peer("Keras on JAX, under jit", ("keras", "jax")),
    "flax-linen": Peer("flax.linen.MultiHeadDotProductAttention, under jit", ("flax",)),
    "flax-nnx": Peer("flax.nnx.MultiHeadAttention, under jit", ("flax",)),
    "flax-linen+jaxmha": Peer("flax-linen with attention_fn of jaxmha", ("flax",), least=1024),
    "flax-nnx+jaxmha": Peer("flax-nnx with attention_fn of jaxmha", ("flax",), least=1024),
    "jax-nn": Peer("jax.nn.dot_product_attention between einsums, under jit", ("jax",)),
}
OURS = "jaxmha"
# Implementations of jaxmha and of jax.nn that are timed by name: `jaxmha:blocked`.
IMPLEMENTATIONS = ("native", "few_queries", "blocked", "reference", "cudnn", "tokamax", "splash")
# Paged caches that are timed by name, such as `jaxmha:paged` -> the dtype that they store; None:
# the dtype of the case.
CACHES: dict[str, str | None] = {
    "paged": None,
    "paged-int8": "int8",
    "paged-float8": "float8_e4m3fn",
}
# Peers whose name may end in `:` and one of these.
VARIANTS: dict[str, tuple[str, ...]] = {
    OURS: (*IMPLEMENTATIONS, *CACHES),
    "jax-nn": ("xla", "cudnn"),
    "torch-sdpa": ("cudnn", "flash", "efficient"),
}


def cache_of(name: str) -> str | None:
    """The key of `CACHES` in the name of a peer (`paged` in `jaxmha:paged`), or None."""
    base, _, cache = name.partition(":")
    return cache if base == OURS and cache in CACHES else None


def stored_by(name: str) -> str | None:
    """The dtype of keys and values in the cache of a peer; None: the dtype of the case."""
    return CACHES.get(cache_of(name) or "")


def peer(name: str) -> Peer:
    """A peer by its name, which may end in `:` and an implementation of it."""
    return PEERS[name.partition(":")[0]]


# Flax's own layers -> the same layers with jaxmha's `attention_fn`.
SWAPPED = {"flax-linen": "flax-linen+jaxmha", "flax-nnx": "flax-nnx+jaxmha"}
# Implementations that JAX users have without jaxmha: jaxmha is compared with the fastest of them.
ON_JAX = ("keras-jax", "flax-linen", "flax-nnx", "jax-nn")
