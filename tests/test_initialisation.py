"""Fresh parameters have each framework's own distribution, measured on its live layers."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxmha.converters import flax, keras, torch
from jaxmha.initialisation import init_params
from jaxmha.params import leaves
from tests.converters.layers import foreign

SEEDS = 5
SIZES: dict[str, dict[str, Any]] = {
    "packed": {"num_heads": 8, "features": 256},
    "widths": {"num_heads": 8, "features": 256, "key_features": 128, "value_features": 64},
    "grouped": {"num_heads": 8, "features": 256, "num_kv_heads": 2},
    "value_dim": {"num_heads": 8, "features": 256, "value_head_dim": 16, "out_features": 128},
}


def build(scheme: str, case: str, seed: int) -> Any:
    """The framework's own layer, freshly made."""
    s = SIZES[case]
    N, D = s["num_heads"], s["features"]
    K, Dk, Dv = s.get("num_kv_heads", N), s.get("key_features", D), s.get("value_features", D)
    if scheme == "torch":
        import torch as pytorch

        pytorch.manual_seed(seed)
        layer: Any = pytorch.nn.MultiheadAttention(D, N, kdim=Dk, vdim=Dv, add_bias_kv=True)
        return torch.from_module(layer)[0]
    if scheme == "keras":
        import keras as library

        library.utils.set_random_seed(seed)
        if K != N:
            layer = library.layers.GroupQueryAttention(D // N, N, K)
        else:
            h = s.get("value_head_dim", D // N)
            layer = library.layers.MultiHeadAttention(
                N, D // N, value_dim=h, output_shape=s.get("out_features")
            )
        layer.build((None, None, D), (None, None, Dv), (None, None, Dk))
        return keras.from_module(layer)[0]
    from flax import nnx

    layer = nnx.MultiHeadAttention(
        N, D, in_kv_features=Dk, num_kv_heads=K, decode=False, rngs=nnx.Rngs(seed)
    )
    return flax.from_module(layer)[0]


@pytest.mark.parametrize(
    ("scheme", "case"),
    [
        ("torch", "packed"),
        ("torch", "widths"),
        ("keras", "packed"),
        ("keras", "widths"),
        ("keras", "grouped"),
        ("keras", "value_dim"),
        ("flax", "packed"),
        ("flax", "grouped"),
    ],
)
def test_moments_and_range_equal_the_framework_s(scheme: Any, case: str) -> None:
    with foreign():
        theirs = [leaves(build(scheme, case, seed)) for seed in range(SEEDS)]
    ours = [
        leaves(
            init_params(
                jax.random.key(seed), scheme=scheme, use_bias_kv=scheme == "torch", **SIZES[case]
            )
        )
        for seed in range(SEEDS)
    ]
    assert ours[0].keys() == theirs[0].keys()
    for name in ours[0]:
        assert ours[0][name].shape == theirs[0][name].shape, name
        a, b = (
            np.stack([np.asarray(x[name], np.float64) for x in side]) for side in (ours, theirs)
        )
        if name.endswith("bias"):
            assert not a.any(), name
            assert not b.any(), name
            continue
        # Six standard errors of the difference of two sample standard deviations.
        noise = 6 * (1 / a.size) ** 0.5
        assert abs(a.std() / b.std() - 1) < noise, (name, a.std(), b.std())
        assert abs(a.mean()) < 6 * a.std() * a.size**-0.5, name
        if not name.startswith("bias_"):  # normal: its range is not bounded
            assert abs(np.abs(a).max() / np.abs(b).max() - 1) < 0.01, name


def test_is_a_function_of_the_key() -> None:
    first, again, other = (
        init_params(jax.random.key(seed), num_heads=2, features=6) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first.query.kernel, again.query.kernel)
    assert not np.array_equal(first.query.kernel, other.query.kernel)
    assert not np.array_equal(first.query.kernel, first.key.kernel)


def test_dtype_and_biases() -> None:
    params = init_params(
        jax.random.key(0), num_heads=2, features=6, dtype="bfloat16", use_bias=False
    )
    assert all(leaf.dtype.name == "bfloat16" for leaf in leaves(params).values())
    assert params.query.bias is None


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 4, "features": 6}, "Dq=6 is not a multiple of num_heads N=4"),
        ({"num_heads": 4, "features": 8, "num_kv_heads": 3}, "N=4 must be a multiple of"),
        ({"num_heads": 2, "features": 6, "scheme": "he"}, "scheme must be one of"),
    ],
)
def test_bad_sizes_are_named(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        init_params(jax.random.key(0), **sizes)
