"""Fresh parameters have each framework's own distribution, measured on its live layers."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxmha.converters import flax, keras, torch
from jaxmha.initializers import init_params
from jaxmha.params import leaves
from tests.promotion import foreign

SEEDS = 12
# Two samples of one distribution stay below this many standard errors but once in a billion cases.
SIGMAS = 6.0
SIZES: dict[str, dict[str, Any]] = {
    "packed": {"num_heads": 8, "features": 128},
    "heads": {"num_heads": 6, "features": 96, "head_dim": 20},
    "one_kv_width": {"num_heads": 8, "features": 128, "key_features": 64, "out_features": 32},
    "widths": {"num_heads": 8, "features": 128, "key_features": 64, "value_features": 32},
    "grouped": {"num_heads": 8, "features": 128, "num_kv_heads": 2},
    "value_dim": {"num_heads": 8, "features": 128, "value_head_dim": 8, "out_features": 64},
}


def build(scheme: str, case: str, seed: int) -> Any:
    """The framework's own layer, freshly made."""
    s = SIZES[case]
    N, D = s["num_heads"], s["features"]
    H, Do = s.get("head_dim", D // N), s.get("out_features", D)
    K, Dk = s.get("num_kv_heads", N), s.get("key_features", D)
    Dv = s.get("value_features", Dk)
    if scheme == "torch":
        import torch as pytorch

        pytorch.manual_seed(seed)
        layer: Any = pytorch.nn.MultiheadAttention(D, N, kdim=Dk, vdim=Dv, add_bias_kv=True)
        return torch.from_module(layer, batch_first=False)[0]
    if scheme == "keras":
        import keras as library

        library.utils.set_random_seed(seed)
        if K != N:
            layer = library.layers.GroupQueryAttention(H, N, K)
        else:
            h = s.get("value_head_dim", H)
            layer = library.layers.MultiHeadAttention(
                N, H, value_dim=h, output_shape=s.get("out_features")
            )
        layer.build((None, None, D), (None, None, Dv), (None, None, Dk))
        return keras.from_module(layer)[0]
    settings = {"qkv_features": N * H, "out_features": Do, "decode": False}
    if scheme == "linen":
        from flax import linen

        module = linen.MultiHeadDotProductAttention(N, deterministic=True, **settings)
        x, y, z = (np.zeros((1, 1, width), np.float32) for width in (D, Dk, Dv))
        return flax.from_module(module, module.init(jax.random.key(seed), x, y, z))[0]
    layer = nnx.MultiHeadAttention(
        N, D, in_kv_features=Dk, num_kv_heads=K, rngs=nnx.Rngs(seed), **settings
    )
    return flax.from_module(layer)[0]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Kolmogorov and Smirnov: the largest distance of the two distribution functions, in units
    of its scale for samples of one distribution."""
    a, b = np.sort(a.ravel()), np.sort(b.ravel())
    both = np.concatenate([a, b])
    shares = [np.searchsorted(x, both, side="right") / x.size for x in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max() * (a.size * b.size / (a.size + b.size)) ** 0.5)


# Exceeded once in ten million pairs of samples: sqrt(-log(1e-7 / 2) / 2).
FAR = 2.9


@pytest.mark.slow_variants("linen*", "keras-value_dim", "flax-grouped")
@pytest.mark.parametrize(
    ("scheme", "case"),
    [
        ("torch", "packed"),
        pytest.param(*("torch", "widths"), marks=pytest.mark.slow),
        ("keras", "packed"),
        pytest.param(*("keras", "heads"), marks=pytest.mark.slow),
        pytest.param(*("keras", "widths"), marks=pytest.mark.slow),
        pytest.param(*("keras", "grouped"), marks=pytest.mark.slow),
        ("keras", "value_dim"),
        ("flax", "packed"),
        pytest.param(*("flax", "heads"), marks=pytest.mark.slow),
        pytest.param(*("flax", "one_kv_width"), marks=pytest.mark.slow),
        ("flax", "grouped"),
        pytest.param(*("linen", "packed"), marks=pytest.mark.slow),
        ("linen", "widths"),
    ],
)
def test_distribution_equals_the_framework_s(scheme: str, case: str) -> None:
    with foreign():
        theirs = [leaves(build(scheme, case, seed)) for seed in range(SEEDS)]
    own: Any = "flax" if scheme == "linen" else scheme
    ours = [
        leaves(
            init_params(
                jax.random.key(seed), scheme=own, use_bias_kv=scheme == "torch", **SIZES[case]
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
        # The standard error of the difference of two sample standard deviations.
        assert abs(a.std() / b.std() - 1) < SIGMAS * a.size**-0.5, (name, a.std(), b.std())
        assert abs(a.mean()) < SIGMAS * a.std() * a.size**-0.5, name
        assert distance(a, b) < FAR, name
        if not name.startswith("bias_"):  # normal: its range is not bounded
            assert abs(np.abs(a).max() / np.abs(b).max() - 1) < 0.01, name
        # No seed repeats another, as no projection repeats another.
        rows = a.reshape(SEEDS, -1)
        correlation = np.corrcoef(rows) - np.eye(SEEDS)
        assert np.abs(correlation).max() < SIGMAS * rows.shape[1] ** -0.5, name


def test_projections_are_independent() -> None:
    for scheme in ("torch", "keras", "flax"):
        params = init_params(jax.random.key(0), scheme=scheme, use_bias_kv=True, **SIZES["packed"])
        rows = [np.asarray(x).ravel() for k, x in leaves(params).items() if "kernel" in k]
        correlation = np.corrcoef(rows) - np.eye(4)
        assert np.abs(correlation).max() < SIGMAS * rows[0].size ** -0.5


@pytest.mark.parametrize("wrong", [1.02, 0.98])
def test_a_wrong_deviation_or_shape_would_be_seen(wrong: float) -> None:
    """The bounds above are narrow: two per cent of spread, or a normal of the same spread."""
    rng = np.random.default_rng(0)
    shape = (SEEDS, 128, 128)
    uniform, again = rng.uniform(-1, 1, shape), rng.uniform(-1, 1, shape)
    assert distance(uniform, again) < FAR
    assert distance(uniform * wrong, again) > FAR
    assert abs(uniform.std() * wrong / again.std() - 1) > SIGMAS * uniform.size**-0.5
    assert distance(rng.normal(size=shape) * uniform.std(), again) > FAR


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


@pytest.mark.parametrize("name", ["num_heads", "features", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("size", [0, -2, True])
def test_sizes_are_at_least_one(name: str, size: int) -> None:
    sizes: dict[str, Any] = {"num_heads": 2, "features": 6, name: size}
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {size}"):
        init_params(jax.random.key(0), **sizes)


def test_dtypes_are_not_rounded() -> None:
    for dtype, message in (("float64", "jax_enable_x64"), ("int32", "must be floating, got int32")):
        with pytest.raises(TypeError, match=message):
            init_params(jax.random.key(0), num_heads=2, features=6, dtype=dtype)
