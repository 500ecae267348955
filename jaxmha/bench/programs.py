"""From the name of a peer to its program; a peer's packages are imported when it is asked for."""

from jaxmha.bench import peers
from jaxmha.bench.case import Case
from jaxmha.bench.data import Data
from jaxmha.bench.program import Program


def small(peer: str) -> None:
    """A program of a few numbers, so that the peer's framework, compiler and threads are there."""
    if peer.startswith("torch"):
        import torch

        torch.softmax(torch.ones(8, 8) @ torch.ones(8, 8), -1)
    elif peer == "keras-tf":
        import tensorflow as tf

        tf.function(lambda x: tf.nn.softmax(x @ x))(tf.ones((8, 8)))
    else:
        import jax

        jax.jit(lambda x: jax.nn.softmax(x @ x))(jax.numpy.ones((8, 8))).block_until_ready()


def program(peer: str, case: Case, data: Data) -> Program:
    """The case as the peer computes it.

    Raises:
      UnsupportedError: the peer has nothing that computes it.
    """
    if case.kind == "decode" and (case.scope == "layer" or peers.cache_of(peer) is not None):
        from jaxmha.bench import decode_peers

        return decode_peers.program(peer, case, data)
    if peer.startswith("torch"):
        from jaxmha.bench import torch_peers

        path, _, backend = peer.removeprefix("torch-").partition(":")
        return torch_peers.program(case, data, path=path, backend=backend)  # type: ignore[arg-type]
    if peer == "keras-tf":
        from jaxmha.bench import tensorflow_peers

        return tensorflow_peers.program(case, data)
    from jaxmha.bench import jax_peers

    return jax_peers.program(peer, case, data)
