"""Wrong arguments of rotary positions are refused by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha import (
    KVCache,
    decode_step,
    extend,
    latent,
    prefill,
    rope,
    rope_frequencies,
)
from jaxmha.flax import attention_fn, linen
from tests import drawn
from tests.drawn import to_jax
from tests.tolerance import assert_same

pytestmark = pytest.mark.usefixtures("no_shape_hook")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequencies": np.ones(1)}, "frequencies must be those of rope_frequencies, got ndarray"),
        ({"frequencies": {"factor": 2.0}}, "frequencies must be those .* got dict"),
        ({"rotary_dim": "a"}, "rotary_dim must be an integer"),
        ({"rotary_dim": 2.0}, "rotary_dim must be an integer"),
        ({"rotary_dim": -2}, "rotary_dim must be an integer"),
        ({"sections": 2}, "sections must be a tuple of integers, got int"),
        ({"sections": (3, -1)}, "sections must be an integer of at least 0, got -1"),
        ({"sections": (1.0, 1.0)}, "sections must be an integer of at least 0, got 1.0"),
    ],
)
def test_of_rope(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        rope(np.ones((2, 3, 1, 4), np.float32), np.zeros((2, 3), np.int32), **options)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("linear", {}, "config must be a mapping, got str"),
        (None, {}, "config must be a mapping, got NoneType"),
        ({"rope_scaling": "linear"}, {}, "rope_parameters must be a mapping, got str"),
        ({"rope_parameters": {"full": {"rope_theta": 1.0}}}, {}, "per kind .*'full'"),
        ({"full": {"rope_theta": 1.0}, "sliding": {}}, {}, "per kind .*'full', 'sliding'"),
        ({}, {"head_dim": 7}, "head_dim=7 .* must be even"),
        ({}, {"head_dim": 0}, "head_dim must be an integer of at least 1, got 0"),
        ({}, {"head_dim": -4}, "head_dim must be an integer"),
        ({}, {"head_dim": 8.0}, "head_dim must be an integer"),
        ({}, {"length": -1}, "length must be an integer"),
        ({"partial_rotary_factor": 3}, {}, "partial_rotary_factor must be at most 1, got 3"),
        ({"partial_rotary_factor": 0}, {}, "partial_rotary_factor must be a number above 0"),
        ({"partial_rotary_factor": 0.1}, {}, "partial_rotary_factor=0.1 rotates 0 features"),
        ({"rope_theta": 0.0}, {}, "rope_theta must be a number above 0"),
        ({"rope_theta": "big"}, {}, "rope_theta must be a number above 0, got 'big'"),
        ({"rope_type": "linear", "factor": 0}, {}, "factor must be a number above 0, got 0"),
        ({"rope_type": "linear"}, {}, "'linear' lack 'factor'"),
        ({"rope_type": "dynamic", "factor": 2.0}, {"length": 9}, "lack 'max_position_embeddings'"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, {}, "lack 'factor'"),
        (
            {**LLAMA3, "low_freq_factor": 4, "high_freq_factor": 4},
            {},
            "low_freq_factor=4.0 must be",
        ),
        (
            {"rope_type": "longrope", "factor": 2, "original_max_position_embeddings": 64}
            | {"short_factor": [1.0]},
            {},
            "short_factor must be 4 numbers above 0",
        ),
    ],
)
def test_of_frequencies(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        rope_frequencies(config, **{"head_dim": 8} | options)


LENGTHS = {"original_max_position_embeddings": 16, "max_position_embeddings": 32}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "attention_factor": 1.0}
SCALES = {"beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.9}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {},
    "dynamic": {},
    "proportional": {},
    "yarn": {**LENGTHS, **SCALES},
    "llama3": {**LENGTHS, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {**LENGTHS, **FACTORS},
}
ODD: tuple[Any, ...] = (
    -1, 0, 1, 1e308, 1e-320, 10**400, np.nan, np.inf, -np.inf, "8", True, [], [1.0], {}, 1j,
)  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_parameter_is_named_or_gives_finite_frequencies(kind: str) -> None:
    given = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0, **KINDS[kind]}
    for key in [*given, "attention_factor"]:
        for value in ODD:
            config = {**given, key: value, "partial_rotary_factor": 1.0}
            for length in (0, 100):
                try:
                    found = rope_frequencies(config, 8, length=length)
                except (TypeError, ValueError) as error:
                    assert key in str(error) or "rope" in str(error), (key, value)  # noqa: PT017
                else:
                    assert all(0 <= x < np.inf for x in found.values), (key, value)
                    assert 0 < found.factor < np.inf, (key, value)


def test_a_configuration_may_hold_other_mappings() -> None:
    config = {"type": "linear", "factor": 2.0, "vision_config": {"rope_theta": 1.0}}
    assert rope_frequencies(config, 4).values == (0.5, float(np.float32(0.005)))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda heads: heads[..., :1],
            r"rotate must return heads of the shape .* got \(2, 5, .* 1\)",
        ),
        (lambda heads: (heads, heads), "rotate must return an array, got tuple"),
        (lambda heads: heads.astype(np.int32), "rotate must return floating heads, got int32"),
    ],
)
def test_of_what_a_rotation_returns(returned: Callable[[jax.Array], Any], message: str) -> None:
    def rotate(heads: jax.Array, positions: jax.Array) -> Any:
        return returned(heads)

    x, heads = jnp.ones((2, 5, 6)), jnp.ones((2, 5, 3, 4))
    params = drawn.params(num_heads=3, features=6)
    of_latents = drawn.latent_params(
        num_heads=3, features=6, latent_dim=7, rotary_dim=2, head_dim=4
    )
    layer, variables = linen.MultiHeadAttention.from_params(params, rotate=rotate)
    calls: tuple[Callable[[], object], ...] = (
        lambda: prefill(params, x, KVCache.empty(params, 2, 7), rotate=rotate),
        lambda: latent.latent_attention(of_latents, x, rotate=rotate),
        lambda: layer.apply(variables, x),
        lambda: attention_fn(heads, heads, heads, rotate=rotate),
    )
    for call in calls:
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def widening(heads: jax.Array, positions: jax.Array) -> jax.Array:
    """A rotation as many write it, which returns float32 for half precision."""
    return rope(heads.astype(np.float32), positions)


def casting(heads: jax.Array, positions: jax.Array) -> jax.Array:
    return widening(heads, positions).astype(heads.dtype)


@pytest.mark.slow_variants("1")
@pytest.mark.parametrize("T", [1, 5])
def test_a_rotation_that_widens_half_precision(T: int) -> None:
    half: Any = jnp.bfloat16
    params = drawn.params(num_heads=3, features=6, dtype=half)
    x = to_jax(np.random.default_rng(0).standard_normal((2, T, 6)), half)
    cache = KVCache.empty(params, 2, 7)._replace(lengths=np.asarray([1, 0]))

    def by_flax(*_: object, rotate: Any) -> Any:
        layer, variables = linen.MultiHeadAttention.from_params(params, rotate=rotate)
        return layer.apply(variables, x)

    for call in (prefill, extend, decode_step, by_flax):
        found, want = (call(params, x, cache, rotate=rotate) for rotate in (widening, casting))
        assert jax.tree.leaves(found)[0].dtype == half
        jax.tree.map(assert_same, found, want)
