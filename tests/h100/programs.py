"""Everyday programs, each as jaxmha and as `jax.nn` with cuDNN compute it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxmha
from jaxmha import Mask, MHAParams, Projection

BF16 = jnp.bfloat16
Attend = Callable[..., Any]


class Case(NamedTuple):
    """One program.

    Attributes:
      build: makes the program of an attention function.
      arguments: shapes of its arrays.
      peer: whether `jax.nn` computes the same; else the program has `temporary` and `kernels`.
      temporary: MiB of temporary arrays allowed, and `kernels` allowed, where there is no peer.
    """

    build: Callable[[Attend], Callable[..., Any]]
    arguments: tuple[Any, ...]
    peer: bool = True
    temporary: float = 0
    kernels: int = 0


def ours(query: Any, key: Any, value: Any, *, padding: Any = None, **options: Any) -> Any:
    """Attention of jaxmha; `padding`: the valid keys, `B S`."""
    if padding is not None:
        options["mask"] = Mask.padding(key_value=padding)
    return jaxmha.dot_product_attention(query, key, value, **options)


def theirs(query: Any, key: Any, value: Any, *, padding: Any = None, **options: Any) -> Any:
    """The same call of `jax.nn`, whose masks have all of `B N T S` but N."""
    if padding is not None:
        shape = (query.shape[0], 1, query.shape[1], key.shape[1])
        options["mask"] = jnp.broadcast_to(padding[:, None, None], shape)
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options)


def array(*shape: int, dtype: Any = BF16) -> Any:
    """The shape and dtype of an array."""
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype)


def heads(
    B: int = 2, T: int = 2048, N: int = 16, H: int = 128, *, S: int | None = None, K: int = 0
) -> tuple[Any, Any, Any]:
    """Queries, keys and values."""
    keys = array(B, S or T, K or N, H)
    return array(B, T, N, H), keys, keys


def forward(*names: str, **options: Any) -> Callable[[Attend], Callable[..., Any]]:
    """Attention of heads and of further arguments, which `names` name."""

    def build(attend: Attend) -> Callable[..., Any]:
        def run(q: Any, k: Any, v: Any, *others: Any) -> Any:
            return attend(q, k, v, **dict(zip(names, others, strict=True)), **options)

        return run

    return build


def gradient(*names: str, **options: Any) -> Callable[[Attend], Callable[..., Any]]:
    """Output and gradients of heads, from an output cotangent."""

    def build(attend: Attend) -> Callable[..., Any]:
        run = forward(*names, **options)(attend)

        def grads(q: Any, k: Any, v: Any, d_out: Any, *others: Any) -> Any:
            out, pull = jax.vjp(lambda *x: run(*x, *others), q, k, v)
            return out, pull(d_out)

        return grads

    return build


def layer(attend: Attend, **options: Any) -> Callable[..., Any]:
    """A layer with biases."""
    if attend is ours:

        def run(x: Any, kernels: Any, biases: Any) -> Any:
            q, k, v, out = map(Projection, kernels, biases)
            params = MHAParams(q, k, v, out)
            return jaxmha.multi_head_attention(params, x, **options)
    else:

        def run(x: Any, kernels: Any, biases: Any) -> Any:
            q, k, v = (
                jnp.einsum("bte,enh->btnh", x, kernel) + bias
                for kernel, bias in zip(kernels[:3], biases[:3], strict=True)
            )
            return jnp.einsum("btnh,nhe->bte", attend(q, k, v, **options), kernels[3]) + biases[3]

    return run


def layer_gradient(attend: Attend) -> Callable[..., Any]:
    """A causal layer and the gradients of all that it reads."""

    def grads(d_out: Any, *arguments: Any) -> Any:
        out, pull = jax.vjp(layer(attend, is_causal=True), *arguments)
        return out, pull(d_out)

    return grads


def layer_arguments(B: int, T: int, E: int, N: int) -> tuple[Any, ...]:
    """Features, four kernels, four biases."""
    kernel, bias = array(E, N, E // N), array(N, E // N)
    return array(B, T, E), (kernel,) * 3 + (array(N, E // N, E),), (bias,) * 3 + (array(E),)


LENGTHS = array(2, dtype=jnp.int32)
VALID = array(2, 2048, dtype=jnp.bool_)
OUT = array(2, 2048, 16, 128)
BOTH = ("query_seq_lengths", "key_value_seq_lengths")
GQA = {"N": 32, "K": 8}
# A causal layer's arguments: 8 x 2048 positions of 2048 features.
LAYER = layer_arguments(8, 2048, 2048, 16)

PROGRAMS: dict[str, Case] = {
    "full": Case(forward(), heads()),
    "full gradient": Case(gradient(), (*heads(), OUT)),
    "causal gradient": Case(gradient(is_causal=True), (*heads(), OUT)),
    "lengths": Case(forward("key_value_seq_lengths"), (*heads(), LENGTHS)),
    "lengths gradient": Case(gradient("key_value_seq_lengths"), (*heads(), OUT, LENGTHS)),
    "padding": Case(forward("padding"), (*heads(), VALID)),
    "padding, half as many key heads": Case(forward("padding"), (*heads(K=8), VALID)),
    "one query": Case(
        forward("key_value_seq_lengths"),
        (*heads(64, 1, 64, 128, S=8192, K=8), array(64, dtype=jnp.int32)),
    ),
    "T = 197": Case(forward(), heads(64, 197, 12, 64)),
    "layer": Case(partial(layer), LAYER),
    "causal": Case(forward(is_causal=True), heads()),
    "causal T = 8192": Case(forward(is_causal=True), heads(1, 8192)),
    "causal gradient T = 8192": Case(
        gradient(is_causal=True), (*heads(1, 8192), array(1, 8192, 16, 128))
    ),
    "grouped": Case(forward(is_causal=True), heads(**GQA)),
    "grouped gradient": Case(gradient(is_causal=True), (*heads(**GQA), array(2, 2048, 32, 128))),
    "one key head": Case(forward(is_causal=True), heads(N=32, K=1)),
    "H = 64": Case(gradient(), (*heads(H=64), array(2, 2048, 16, 64))),
    "H = 256": Case(forward(is_causal=True), heads(H=256)),
    "float16": Case(forward(), tuple(x.update(dtype=jnp.float16) for x in heads())),
    "causal lengths": Case(forward("key_value_seq_lengths", is_causal=True), (*heads(), LENGTHS)),
    "causal lengths gradient": Case(
        gradient("key_value_seq_lengths", is_causal=True), (*heads(), OUT, LENGTHS)
    ),
    "both lengths": Case(forward(*BOTH), (*heads(), LENGTHS, LENGTHS)),
    "both lengths gradient": Case(gradient(*BOTH), (*heads(), OUT, LENGTHS, LENGTHS)),
    "window": Case(forward(local_window_size=(128, 0), is_causal=True), heads()),
    "window gradient": Case(gradient(local_window_size=(128, 0), is_causal=True), (*heads(), OUT)),
    "cross": Case(forward(), heads(T=512, S=2048)),
    "one query, no lengths": Case(forward(), heads(64, 1, 64, 128, S=8192, K=8)),
    "T = 1000": Case(forward(is_causal=True), heads(T=1000)),
    "layer gradient": Case(layer_gradient, (LAYER[0], *LAYER)),
}
# `jax.nn` refuses the first, and lets keys that a mask excludes reach the output if they are NaN.
ALONE: dict[str, Case] = {
    "T = 197 gradient": Case(
        gradient(), (*heads(64, 197, 12, 64), array(64, 197, 12, 64)), False, 150, 12
    ),
    # Two tables of the positions of valid keys, where copies of keys and values would be 2 GiB.
    "padding, one query": Case(
        forward("padding"),
        (*heads(64, 1, 64, 128, S=8192, K=8), array(64, 8192, dtype=jnp.bool_)),
        False,
        5,
        4,
    ),
    # `jax.nn` needs 0 and 16 MiB. The other 32 are keys and values, zeroed where nothing attends them: a
    # bias, of -inf too, leaves every output NaN if one of them is (on an H100, cuDNN 9.19). 128 are the
    # clipped bias: as given, rows of the lowest bfloat16 are wrong there.
    "bias": Case(forward("bias"), (*heads(), array(1, 16, 2048, 2048)), False, 161, 6),
    "dense mask": Case(
        forward("mask"), (*heads(), array(2, 1, 2048, 2048, dtype=jnp.bool_)), False, 49, 6
    ),
    "padding gradient": Case(gradient("padding"), (*heads(), OUT, VALID), False, 34, 7),
    "padding causal": Case(forward("padding", is_causal=True), (*heads(), VALID), False, 69, 7),
    "padding causal H = 256": Case(
        forward("padding", is_causal=True), (*heads(H=256), VALID), False, 113, 8
    ),
}
