"""Who is timed on a GPU. A program is compiled once, and `run(n)` calls it n times and waits."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmha
from experiments.benchmarks.gpu_cases import Shape
from jaxmha.bench import jax_peers
from jaxmha.bench.jax_peers import Attend


class Program(NamedTuple):
    """`run(n)` computes n times and waits; `bytes`: temporaries and results, where it is known."""

    run: Callable[[int], None]
    bytes: int | None


# Name and whether it holds all scores.
JAX = {"jaxmha": False, "jax-nn": True, "jax-cudnn": False, "flax-nnx": True, "flax-linen": True}
TORCH = ("torch", "torch-cudnn", "torch-flash", "torch-efficient")


def names(shape: Shape) -> list[str]:
    """Peers of a shape that are installed."""
    found = [name for name, slow in JAX.items() if not slow or shape.peers == "all"]
    if find_spec("flax") is None:
        found = [name for name in found if not name.startswith("flax")]
    return found + (list(TORCH) if find_spec("torch") is not None else [])


def normal(seed: int, *sizes: int) -> jax.Array:
    """Drawn on the device, where that takes no time."""
    drawn: jax.Array = _normal(jax.random.key(seed), sizes)
    return drawn


@partial(jax.jit, static_argnums=1)
def _normal(key: Any, sizes: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, sizes, jnp.bfloat16)


def inputs(shape: Shape) -> dict[str, jax.Array]:
    """The input arrays of a shape, the same for every peer."""
    B, T, N, K, H = shape.B, shape.T, shape.N, shape.K, shape.H
    found = {"query": normal(0, B, T, N, H), "key": normal(1, B, T, K, H)}
    found["value"] = normal(2, B, T, K, H)
    if shape.kind == "bias":
        found["bias"] = normal(3, 1, N, T, T)
    if shape.backward:
        found["cotangent"] = normal(4, B, T, N, H)
    return found


def attention(name: str) -> Callable[..., Any]:
    """`(query, key, value, Attend) -> out` of a JAX peer; Flax has no grouped heads."""
    if name == "jax-cudnn":
        return partial(jax_peers.of_jax_nn, implementation="cudnn")
    core = jax_peers.PEERS[name][0]
    if not name.startswith("flax"):
        return core

    def repeated(q: Any, k: Any, v: Any, to: Attend) -> Any:
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
        return core(q, k, v, to)

    return repeated


def jax_program(name: str, shape: Shape, given: dict[str, Any]) -> Program:
    """A JAX peer, compiled."""
    attend, causal = attention(name), shape.kind == "causal"
    lengths = None if shape.lengths is None else jnp.asarray(shape.lengths)
    keep = None
    if shape.kind == "padding":
        assert lengths is not None
        keep, lengths = jnp.arange(shape.T).reshape(1, -1) < lengths[:, None], None

    def forward(q: Any, k: Any, v: Any, bias: Any, lengths: Any, keep: Any) -> Any:
        return attend(q, k, v, Attend(lengths, keep, bias, causal))

    def both(q: Any, k: Any, v: Any, bias: Any, lengths: Any, keep: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: forward(q, k, v, bias, lengths, keep), q, k, v)
        return out, pull(cotangent)

    heads = (given[x] for x in ("query", "key", "value"))
    arguments: tuple[Any, ...] = (*heads, given.get("bias"), lengths, keep)
    if shape.backward:
        arguments += (given["cotangent"],)
    return compiled(both if shape.backward else forward, *arguments)


def compiled(function: Callable[..., Any], *arguments: Any) -> Program:
    """Any function of JAX."""
    program = jax.jit(function).lower(*arguments).compile()
    memory = program.memory_analysis()
    used = None
    if memory is not None:
        used = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def run(n: int) -> None:
        out = None
        for _ in range(n):
            out = program(*arguments)
        jax.block_until_ready(out)  # type: ignore[no-untyped-call]

    return Program(run, used)


def torch_program(name: str, shape: Shape, given: dict[str, Any], device: str) -> Program:
    """torch's scaled_dot_product_attention, by one of its backends or by its own choice."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.dlpack import from_dlpack

    backend = {
        "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
        "torch-flash": SDPBackend.FLASH_ATTENTION,
        "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
    }.get(name)

    q, k, v = (
        from_dlpack(given[x]).transpose(1, 2).contiguous() for x in ("query", "key", "value")
    )
    mask = from_dlpack(given["bias"]) if "bias" in given else None
    if shape.lengths is not None:
        counts = torch.from_numpy(shape.lengths).to(device)
        mask = (torch.arange(shape.T, device=device) < counts[:, None])[:, None, None]
        mask = mask.expand(shape.B, 1, shape.T, shape.T)
    leaves = [x.requires_grad_(shape.backward) for x in (q, k, v)]
    cotangent = from_dlpack(given["cotangent"]).transpose(1, 2) if shape.backward else None
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=shape.kind == "causal",
        enable_gqa=shape.N != shape.K,
    )

    def once() -> None:
        if not shape.backward:
            with torch.no_grad():
                attend(q, k, v)
            return
        torch.autograd.grad(attend(q, k, v), leaves, cotangent)

    def run(n: int) -> None:
        if backend is None:
            for _ in range(n):
                once()
        else:
            with sdpa_kernel(backend):
                for _ in range(n):
                    once()
        if device != "cpu":
            torch.cuda.synchronize()

    run(1)
    return Program(run, None)


def program(name: str, shape: Shape, given: dict[str, Any], device: str) -> Program:
    """The peer's program for a shape; whatever its framework raises says why there is none."""
    if name.startswith("torch"):
        return torch_program(name, shape, given, device)
    return jax_program(name, shape, given)


def layer(name: str, T: int, E: int, N: int, B: int, device: str) -> Program:
    """A whole layer, causal self-attention, forward."""
    tokens = normal(0, B, T, E)
    if name.startswith("torch"):
        return _torch_layer(name, tokens, N, device)
    params = jaxmha.init_params(jax.random.key(0), num_heads=N, features=E, dtype=jnp.bfloat16)
    variables, run = jax_peers.PEERS[name][1](params)
    return compiled(lambda v, x: run(v, x, x, x, Attend(causal=True)), variables, tokens)


def _torch_layer(name: str, tokens: jax.Array, N: int, device: str) -> Program:
    import torch
    from torch.utils.dlpack import from_dlpack

    _, T, E = tokens.shape
    module = torch.nn.MultiheadAttention(E, N, batch_first=True).to(device, torch.bfloat16).eval()
    given = from_dlpack(tokens)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(T).to(device, torch.bfloat16)
    options: Any = {"attn_mask": mask, "is_causal": True, "need_weights": name == "torch-weights"}

    def run(n: int) -> None:
        # Its fast path holds all scores where there is a mask.
        torch.backends.mha.set_fastpath_enabled(name != "torch-sdpa")
        with torch.no_grad():
            for _ in range(n):
                module(given, given, given, **options)
        torch.backends.mha.set_fastpath_enabled(True)
        if device != "cpu":
            torch.cuda.synchronize()

    run(1)
    return Program(run, None)


LAYER_PEERS = ("jaxmha", "flax-nnx", "flax-linen", "torch", "torch-sdpa", "torch-weights")


def decode(name: str, B: int, S: int, N: int, K: int, H: int) -> Program:
    """One query per sequence over a full cache, without projections."""
    query, key, value = normal(0, B, 1, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)
    lengths = jnp.full(B, S - 3, np.int32)
    attend = attention(name)
    return compiled(lambda q, k, v, n: attend(q, k, v, Attend(n)), query, key, value, lengths)


def decode_step(B: int, S: int, N: int, K: int, H: int) -> Program:
    """`jaxmha.decode_step` with small projections, over a full cache that it brings up to date."""
    params = jaxmha.init_params(
        jax.random.key(0), num_heads=N, num_kv_heads=K, head_dim=H, features=64, dtype=jnp.bfloat16
    )
    lengths = jnp.full(B, S - 3, np.int32)
    held = [jaxmha.KVCache(normal(0, B, K, S, H), normal(1, B, K, S, H), lengths)]
    tokens = normal(2, B, 1, 64)

    def step(cache: Any, x: Any) -> Any:
        out, longer = jaxmha.decode_step(params, x, cache)
        return out, longer._replace(lengths=cache.lengths)  # there is room for three steps only

    program = jax.jit(step, donate_argnums=0).lower(held[0], tokens).compile()

    def run(n: int) -> None:
        out = None
        for _ in range(n):
            out, held[0] = program(held[0], tokens)
        jax.block_until_ready((out, held[0]))  # type: ignore[no-untyped-call]

    return Program(run, None)


DECODE_PEERS = ("jaxmha", "jax-nn", "jax-cudnn")
