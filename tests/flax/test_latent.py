"""The modules of latent attention are `jaxmha.latent`, and DeepSeek-V3 of transformers."""

from functools import partial
from typing import Any

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha import Semantics, latent, rope
from jaxmha.converters import huggingface
from jaxmha.flax.latent import linen, nnx
from jaxmha.latent.params import leaves
from tests import drawn
from tests.converters.test_latent import T as TOKENS
from tests.converters.test_latent import layer, layer_in_float64
from tests.drawn import to_jax
from tests.flax.common import by_numpy
from tests.tolerance import assert_close

B, T, N, D = 2, 7, 3, 11
SIZES: dict[str, Any] = {
    "latent_dim": 5, "rotary_dim": 4, "head_dim": 6, "value_head_dim": 2, "query_latent_dim": 13,
    "out_features": 17, "use_bias": True,
}  # fmt: skip
ROTATE = latent.ScaledQueries(partial(rope, base=100.0, interleaved=True), beta=0.7, floor=3.0)
X = to_jax(np.random.default_rng(0).standard_normal((B, T, D)), "float32")
KINDS = ("linen", "nnx")
STEPS = (slice(0, 2), slice(2, 4), slice(4, 6))


class Made:
    """A module of either kind, called alike."""

    def __init__(self, kind: str, given: Any = None, semantics: Any = Semantics(), **settings: Any):
        settings = {"rotate": ROTATE, **settings}
        if given is None:
            given = drawn.latent_params(num_heads=N, features=D, **SIZES)
        self.variables: Any = None
        if kind == "linen":
            self.module, self.variables = linen.LatentAttention.from_params(
                given, semantics, **settings
            )
        else:
            self.module = nnx.LatentAttention.from_params(given, semantics, **settings)

    def __call__(self, *arguments: Any, method: str = "__call__", **options: Any) -> Any:
        if self.variables is None:
            return getattr(self.module, method)(*arguments, **options)
        return self.module.apply(self.variables, *arguments, method=method, **options)

    def params(self) -> Any:
        return self.module.to_params(*[self.variables] * (self.variables is not None))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_modules_are_the_function(kind: str) -> None:
    made = Made(kind)
    params = made.params()
    want = latent.latent_attention(params, X, rotate=ROTATE, is_causal=True)
    assert_close(made(X, is_causal=True), np.asarray(want))
    at = np.arange(3, T + 3)
    bias = to_jax(np.random.default_rng(1).standard_normal((N, 1, T)), "float32")
    mask = np.random.default_rng(2).random((B, 1, T, T)) < 0.7
    options: dict[str, Any] = {"mask": mask, "bias": bias, "positions": at}
    want = latent.latent_attention(params, X, rotate=ROTATE, **options)
    assert_close(made(X, **options), np.asarray(want))
    assert made(X, is_causal=True).shape == (B, T, 17)


@pytest.mark.everyday(paged=[False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("paged", [False, True])
def test_steps(kind: str, paged: bool) -> None:
    made = Made(kind)
    want = np.asarray(made(X, is_causal=True))
    cache: Any = latent.LatentCache.empty(made.params(), B, T)
    if paged:
        cache = latent.paged_cache(made.params(), B, T, pages=5, page_size=3)
    out, cache = made(X[:, :4], cache, method="prefill")
    outs = [out]
    out, cache = made(X[:, 4:6], cache, method="decode_step")
    outs.append(out)
    out, cache = made(X[:, 6:], cache, q_lengths=jnp.asarray([1, 0]), method="extend")
    assert cache.lengths.tolist() == [7, 6]
    assert_close(jnp.concatenate([*outs, out], 1)[0], want[0])


def test_a_cache_in_the_modules() -> None:
    """`decode` of nnx and of linen, whose first call makes the cache."""
    want = np.asarray(Made("nnx")(X, is_causal=True))
    module = Made("nnx").module
    with pytest.raises(ValueError, match="call init_cache first"):
        module(X, decode=True)
    sizes = {"batch_size": B, "max_length": T}
    module = flax.nnx.view(module, deterministic=True, decode=True, **sizes)
    with pytest.raises(ValueError, match=r"batch_size: .* one batch axis, got \(2, 3\)"):
        flax.nnx.view(Made("nnx").module, decode=True, batch_size=(2, 3), max_length=T)
    outs = [module(X[:, at]) for at in STEPS]
    assert_close(jnp.concatenate(outs, 1), want[:, :6])
    with pytest.raises(ValueError, match="takes no positions; tokens have the positions"):
        module(X[:, :1], positions=np.arange(1))
    made = Made("linen", decode=True)
    with pytest.raises(ValueError, match=r"inputs: expected axes \(B, T, Dq\) with decode=True"):
        made.module.init(jax.random.key(0), X[0])
    state = jax.jit(lambda: made.module.init(jax.random.key(0), X)["cache"])()
    assert state["cache_lengths"].tolist() == [0, 0]
    outs = []
    for at in STEPS:
        variables = {**made.variables, "cache": state}
        out, changed = made.module.apply(variables, X[:, at], mutable=["cache"])
        state = changed["cache"]
        outs.append(out)
    assert_close(jnp.concatenate(outs, 1), want[:, :6])


def test_initialisation_gradients_and_dropout() -> None:
    shapes = {leaf: x.shape for leaf, x in leaves(Made("nnx").params()).items()}
    dropping = Semantics(dropout_rate=0.5)
    named = flax.nnx.with_metadata(by_numpy, name="k")
    module = nnx.LatentAttention(
        N, D, **SIZES, kernel_init=named, semantics=dropping, rngs=flax.nnx.Rngs(0)
    )
    assert module.query.kernel.get_metadata("name") == "k"
    other = linen.LatentAttention(N, **SIZES, semantics=dropping)
    variables = jax.jit(partial(other.init, deterministic=True))({"params": jax.random.key(0)}, X)
    for params in (module.to_params()[0], other.to_params(variables)[0]):
        found = {leaf: np.asarray(x) for leaf, x in leaves(params).items()}
        assert {leaf: x.shape for leaf, x in found.items()} == shapes
        for leaf, x in found.items():
            kind = leaf.partition(".")[2] or "scale"
            fits = {"kernel": x.std() > 0.1, "bias": not x.any(), "scale": bool((x == 1).all())}
            assert fits[kind], leaf
    calls = [np.asarray(module(X, deterministic=still)) for still in (False, True)]
    assert (calls[0] != calls[1]).any()
    dropped = other.apply(variables, X, deterministic=False, rngs={"dropout": jax.random.key(1)})
    whole = other.apply(variables, X, deterministic=True)
    assert (np.asarray(dropped) != np.asarray(whole)).any()
    gradients = flax.nnx.grad(lambda m: m(X, deterministic=True).sum())(module)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    assert len(jax.tree.leaves(gradients)) == len(shapes)


def test_a_module_of_parameters_has_no_random_streams_and_its_own_dtype() -> None:
    module = Made("nnx", semantics=Semantics(dropout_rate=0.5), dtype=jnp.bfloat16).module
    with pytest.raises(ValueError, match="rngs"):
        module(X, deterministic=False)
    for asked, dtype in ((None, "bfloat16"), ("float32", "float32")):
        module.init_cache(B, T, asked)
        assert module.cached_latents[...].dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_parameters(kind: str) -> None:
    params = Made(kind).params()
    with pytest.raises(ValueError, match=r"these lack \['out.bias', 'out.kernel'\]"):
        Made(kind, params._replace(out=None), out_features=None)
    with pytest.raises(ValueError, match="latent_dim=6 is not that of the parameters, 5"):
        Made(kind, params, latent_dim=6)
    same = {"param_dtype": jnp.float32, "out_features": 17}
    assert Made(kind, params, **same).module.param_dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_deepseek_v3_of_transformers(kind: str, x64: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill of 9 tokens and 20 steps."""
    name = "deepseek_v3"
    module, config, (x, want) = layer_in_float64(name, monkeypatch) if x64 else layer(name)
    semantics, rotate = huggingface.latent_behaviour(config.to_dict())
    most = (1e-14 if x64 else 3e-6) * np.abs(want).max()
    with jax.enable_x64(x64):
        params = huggingface.import_latent_params(module.state_dict())
        made = Made(kind, params, semantics, rotate=rotate)
        assert np.abs(made(x, is_causal=True) - want).max() < most
        cache = latent.LatentCache.empty(params, *x.shape[:2])
        out, cache = made(x[:, :9], cache, method="prefill")
        assert np.abs(out - want[:, :9]).max() < most
        for t in range(9, TOKENS):
            out, cache = made(x[:, t : t + 1], cache, method="decode_step")
            assert np.abs(out[:, 0] - want[:, t]).max() < most, t
