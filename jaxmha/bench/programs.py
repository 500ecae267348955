"""Builds the program of a peer from its name, and only then imports the peer's packages."""

from jaxmha.bench import peers
from jaxmha.bench.case import Case
from jaxmha.bench.data import Data
from jaxmha.bench.program import Program


def small(peer: str) -> None:
    """Runs a program of a few numbers, which starts the peer's framework, compiler and threads."""
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
    """The program with which the peer computes the case.

    Raises:
      UnsupportedError: the peer cannot compute it.
    """
    if case.kind == "decode" and (case.scope == "layer" or peers.cache_of(peer) is not None):
        from jaxmha.bench import decode_peers

        return _precise(decode_peers.program(peer, case, data), case)
    if peer.startswith("torch"):
        from jaxmha.bench import torch_peers

        path, _, backend = peer.removeprefix("torch-").partition(":")
        return torch_peers.program(case, data, path=path, backend=backend)  # type: ignore[arg-type]
    if peer == "keras-tf":
        from jaxmha.bench import tensorflow_peers

        return tensorflow_peers.program(case, data)
    from jaxmha.bench import jax_peers

    return _precise(jax_peers.program(peer, case, data), case)


def _precise(program: Program, case: Case) -> Program:
    """The program of JAX, compiled with the products of the case."""
    from jaxmha.bench.limits import precision_of

    def build() -> None:
        with precision_of(case.products):
            program.compile()

    return program._replace(compile=build)
