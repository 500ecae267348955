"""From the name of a peer to its program; a peer's packages are imported when it is asked for."""

from collections.abc import Callable
from functools import partial

from experiments.benchmarks.cases import Case
from experiments.benchmarks.data import Data
from experiments.benchmarks.program import Program, UnsupportedError


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
    if case.kind == "decode" and case.scope == "layer":
        from experiments.benchmarks import decode_peers

        if peer not in decode_peers.PROGRAMS:
            raise UnsupportedError("its layer has no cache of keys and values")
        return decode_peers.PROGRAMS[peer](case, data)
    if peer.startswith("torch"):
        from experiments.benchmarks import torch_peers

        match peer:
            case "torch-sdpa":
                return torch_peers.program(case, data, path="sdpa")
            case "torch-native":
                return torch_peers.program(case, data, path="native")
            case _:
                return torch_peers.program(case, data, path="weights")
    if peer == "keras-tf":
        from experiments.benchmarks import tensorflow_peers

        return tensorflow_peers.program(case, data)
    from experiments.benchmarks import jax_peers

    on_jax: dict[str, Callable[[Case, Data], Program]] = {
        "jaxmha": jax_peers.jaxmha_program,
        "keras-jax": jax_peers.keras_program,
        "flax-linen": jax_peers.linen_program,
        "flax-linen+jaxmha": partial(jax_peers.linen_program, swapped=True),
        "flax-nnx": jax_peers.nnx_program,
        "flax-nnx+jaxmha": partial(jax_peers.nnx_program, swapped=True),
        "jax-nn": jax_peers.jax_nn_program,
    }
    return on_jax[peer](case, data)
