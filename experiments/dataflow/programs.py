"""The options of torch and jaxmha as programs, for one framework and shape in a process of its own.

Every option is a program; they run in rounds, one after another. Programs that are compared compute
the same, which is asserted first.
"""

from collections.abc import Callable
from functools import partial
from timeit import timeit
from typing import Any

import numpy as np

from experiments.dataflow.choices import CHOICES, SHAPES, THREADS, D, N, Shape
from jaxmha.bench.torch_peers import assert_native
from jaxmha.bench.worker import MOST_CALLS, ROUND_SECONDS, pin

Program = Callable[[], Any]
TOLERANCE = 2e-5  # float32, values of about 1


def of_torch(shape: Shape) -> dict[str, Program]:
    """`torch.nn.MultiheadAttention` with its options, in eval mode unless trained."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(D, N, batch_first=True).eval()
    with torch.no_grad():
        layer.in_proj_bias.normal_(std=0.1)
    other = torch.nn.MultiheadAttention(D, N).eval()
    other.load_state_dict(layer.state_dict())
    x = torch.randn(shape.B, shape.T, D)
    swapped = x.transpose(0, 1).contiguous()
    kernels = [part.contiguous() for part in layer.in_proj_weight.detach().chunk(3)]
    enabled = torch.backends.mha.set_fastpath_enabled

    def call(layer: Any, x: Any, fast: bool, **options: Any) -> Any:
        enabled(fast)
        with torch.inference_mode():
            return layer(x, x, x, **options)[0]

    def train(need_weights: bool) -> Any:
        enabled(False)
        layer.zero_grad()
        out = layer(x, x, x, need_weights=need_weights)[0]
        out.sum().backward()
        return out

    def projected(separate: bool) -> Any:
        own: Any = dict(
            zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), kernels, strict=True)
        )
        with torch.inference_mode():
            return torch.nn.functional.multi_head_attention_forward(
                *(swapped, swapped, swapped, D, N),
                None if separate else layer.in_proj_weight,
                *(layer.in_proj_bias, None, None, False, 0.0),
                *(layer.out_proj.weight, layer.out_proj.bias),
                training=False,
                need_weights=False,
                use_separate_proj_weight=separate,
                **(own if separate else {}),
            )[0]

    fast = {"fast": partial(call, layer, x, True, need_weights=False)}
    fast["fast, weights"] = partial(call, layer, x, True)
    for run in fast.values():
        assert_native(run)
    return {
        "weights": partial(call, layer, x, False),
        "weights per head": partial(call, layer, x, False, average_attn_weights=False),
        "no weights": partial(call, layer, x, False, need_weights=False),
        "sequence first": partial(call, other, swapped, False, need_weights=False),
        "packed": partial(projected, False),
        "separate": partial(projected, True),
        **fast,
        "weights, trained": partial(train, True),
        "no weights, trained": partial(train, False),
    }


def of_jaxmha(shape: Shape) -> dict[str, Program]:
    """`jaxmha.multi_head_attention` with the same options, where it has them."""
    import jax
    import jax.numpy as jnp

    import jaxmha

    params = jaxmha.init_params(jax.random.key(0), num_heads=N, features=D)
    x = jax.random.normal(jax.random.key(1), (shape.B, shape.T, D))
    swapped = jnp.swapaxes(x, 0, 1)
    kernel = jnp.concatenate([part.kernel for part in params[:3]], 1)  # (Dq, 3 N, H)
    biases: Any = [part.bias for part in params[:3]]
    bias = jnp.concatenate(biases)

    def attend(params: Any, x: Any) -> Any:
        return jaxmha.multi_head_attention(params, x)

    def per_head(params: Any, x: Any) -> Any:
        return jaxmha.multi_head_attention(params, x, return_weights=True)

    def averaged(params: Any, x: Any) -> Any:
        out, weights = per_head(params, x)
        return out, weights.mean(1)

    def sequence_first(params: Any, x: Any) -> Any:
        return jnp.swapaxes(attend(params, jnp.swapaxes(x, 0, 1)), 0, 1)

    def packed(packed: Any, params: Any, x: Any) -> Any:
        heads = jnp.einsum("btd,dnh->btnh", x, packed.kernel) + packed.bias
        context = jaxmha.dot_product_attention(*jnp.split(heads, 3, axis=2))
        return jaxmha.combine(params, context)

    def trained(forward: Any, params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            out = forward(params, x)
            out = out[0] if isinstance(out, tuple) else out
            return out.sum(), out

        gradients, out = jax.grad(loss, (0, 1), has_aux=True)(params, x)
        return out, gradients

    def program(function: Any, *arguments: Any) -> Program:
        compiled = jax.jit(function)

        def run() -> Any:
            found = jax.block_until_ready(compiled(*arguments))  # type: ignore[no-untyped-call]
            return found[0] if isinstance(found, tuple) else found

        return run

    return {
        "weights": program(averaged, params, x),
        "weights per head": program(per_head, params, x),
        "no weights": program(attend, params, x),
        "sequence first": program(sequence_first, params, swapped),
        "packed": program(packed, jaxmha.Projection(kernel, bias), params, x),
        "separate": program(attend, params, x),
        "weights, trained": program(partial(trained, averaged), params, x),
        "no weights, trained": program(partial(trained, attend), params, x),
    }


PROGRAMS = {"torch": of_torch, "jaxmha": of_jaxmha}


def check(programs: dict[str, Program], shape: Shape) -> None:
    """Raises AssertionError unless what is compared computes the same."""

    def output(name: str) -> Any:
        found = programs[name]()
        array = np.asarray(found.detach() if hasattr(found, "detach") else found)
        return array if array.shape[0] == shape.B else np.swapaxes(array, 0, 1)

    for choice in CHOICES:
        if choice.dear in programs and choice.cheap in programs:
            np.testing.assert_allclose(
                output(choice.dear), output(choice.cheap), atol=TOLERANCE, err_msg=choice.name
            )


def measure(programs: dict[str, Program], rounds: int) -> dict[str, list[float]]:
    """Mean seconds of a call, by program, in every round."""
    calls = {}
    for name, program in programs.items():
        timeit(program, number=2)
        calls[name] = min(MOST_CALLS, max(1, int(2 * ROUND_SECONDS / timeit(program, number=2))))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            seconds[name].append(timeit(program, number=calls[name]) / calls[name])
    return seconds


def run(framework: str, index: int, rounds: int) -> dict[str, list[float]]:
    """Measures a shape in a process of its own."""
    pin(framework, THREADS)
    shape = SHAPES[index]
    programs = PROGRAMS[framework](shape)
    check(programs, shape)
    return measure(programs, rounds)
