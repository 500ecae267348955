"""Options of the modules beyond Flax's are those of jaxmha; both modules hold any parameters."""

from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmha.converters.torch as torch_converter
from jaxmha import (
    KVCache,
    Mask,
    MHAParams,
    Projection,
    Semantics,
    combine,
    decode_step,
    dot_product_attention,
    multi_head_attention,
    project,
    rope,
)
from jaxmha.flax import linen
from jaxmha.flax import nnx as modules
from jaxmha.params import CANONICAL, FORMS, NORMS, from_leaves, leaves
from tests import reference
from tests.flax.common import normal, plain, structure
from tests.tolerance import assert_close, assert_same

pytestmark = pytest.mark.slow

SIZES = {"Dq": 17, "Dk": 19, "Dv": 23, "Do": 29, "N": 6, "K": 3, "H": 10, "h": 13}
B, T, S = 2, 5, 7
EVERYTHING = Semantics(
    scale=0.4,
    logits_soft_cap=1.3,
    add_zero_attn=True,
    qk_norm="rms",
    qk_norm_epsilon=0.01,
    qk_norm_scope="heads",
    qk_norm_offset=1.0,
    clip_qkv=1.7,
)


# The forms of the arrays that a layer of `parameters` does not have.
OTHER_FORMS = tuple(FORMS.values())


def parameters(sizes: dict[str, int] = SIZES, *, without: tuple[str, ...] = ()) -> MHAParams:
    return from_leaves(
        {
            name: normal(name, tuple(sizes[a] for a in axes.split()), scale=0.4)
            for name, axes in CANONICAL.items()
            if name not in (*without, *OTHER_FORMS)
        }
    )


SELF = parameters({**SIZES, "Dk": 17, "Dv": 17})
BARE = ("bias_k", "bias_v", *NORMS, "sinks", "gate.kernel", "gate.bias")
SMALL = parameters({**SIZES, "Dk": 17, "Dv": 17}, without=BARE)


def features(*names: str, sizes: dict[str, int] = SIZES) -> list[Any]:
    length = {"Dq": T, "Dk": S, "Dv": S}
    return [normal(name, (B, length[name], sizes[name])) for name in names]


def layers(params: MHAParams, semantics: Semantics = Semantics(), **settings: Any) -> list[Any]:
    """Both modules as functions of inputs."""
    module, variables = linen.MultiHeadAttention.from_params(params, semantics, **settings)
    return [
        partial(module.apply, variables),
        modules.MultiHeadAttention.from_params(params, semantics, **settings),
    ]


def unturned(heads: Any, positions: Any) -> Any:
    assert positions.shape == heads.shape[:-2]
    return heads


@pytest.mark.parametrize("rotate", [None, unturned], ids=["plain", "rotated by nothing"])
def test_everything_at_once(rotate: Any) -> None:
    params, x = parameters(), features("Dq", "Dk", "Dv")
    lengths = np.array([2, 6])
    mask = Mask.causal(offset=1) & Mask.lengths(key_value=jnp.array(lengths))
    bias = normal("bias", (B, 6, T, S + 2)).at[0, 0, 2].set(-jnp.inf)
    expected, _ = reference.multi_head_attention(
        params, *map(np.asarray, x), semantics=EVERYTHING, bias=np.asarray(bias), causal_offset=1,
        key_value_seq_lengths=lengths,
    )  # fmt: skip
    for layer in layers(params, EVERYTHING, rotate=rotate):
        assert_close(layer(*x, mask=mask, bias=bias), expected)


@pytest.mark.parametrize("window", [2, (None, 1)])
def test_window(window: Any) -> None:
    (x,) = features("Dq")
    left, right = window if isinstance(window, tuple) else (window, window)
    expected = multi_head_attention(SMALL, x, mask=Mask.window(left, right) & Mask.causal())
    for layer in layers(SMALL, local_window_size=window):
        assert_same(layer(x, is_causal=True), expected)


def test_implementation_and_fully_masked_rows() -> None:
    (x,) = features("Dq")
    mask = jnp.ones((B, 1, T, T), bool).at[1, 0, 2].set(False)
    policies: tuple[Any, ...] = ("zero", "nan")
    for policy, names in zip(policies, ("reference", ["blocked"]), strict=True):
        semantics = Semantics(fully_masked=policy)
        expected = multi_head_attention(
            SMALL, x, mask=mask, semantics=semantics, implementation=names
        )
        for layer in layers(SMALL, semantics, implementation=names):
            assert_same(layer(x, mask=mask), expected)
    for kind in (linen, modules):
        with pytest.raises(ValueError, match="implementation must be among"):
            kind.MultiHeadAttention.from_params(SMALL, implementation="flash")


def test_dropout_is_that_of_semantics() -> None:
    (x,), key = features("Dq"), jax.random.key(5)
    semantics = Semantics(dropout_rate=0.4, dropout_broadcast=("N",))
    expected = multi_head_attention(SMALL, x, semantics=semantics, dropout_key=key)
    layer = layers(SMALL, semantics, deterministic=False)[0]
    assert_same(layer(x, dropout_rng=key), expected)
    stream = nnx.Rngs(dropout=key)
    first = stream.dropout()
    module = modules.MultiHeadAttention.from_params(SMALL, semantics, deterministic=False)
    expected = multi_head_attention(SMALL, x, semantics=semantics, dropout_key=first)
    assert_same(module(x, rngs=nnx.Rngs(dropout=key)), expected)


def test_rotations_stand_between_projection_and_attention() -> None:
    (x,) = features("Dq")
    rotate = partial(rope, base=100.0)
    positions = jnp.arange(T)

    @jax.jit
    def by_hand(x: Any) -> Any:
        q, k, v = project(SMALL, x)
        q, k = rotate(q, positions), rotate(k, positions)
        return combine(SMALL, dot_product_attention(q, k, v, is_causal=True))

    expected = by_hand(x)
    for layer in layers(SMALL, rotate=rotate):
        assert_close(layer(x, is_causal=True), expected)


def test_rotated_layer_ignores_what_nothing_attends() -> None:
    x = features("Dq", "Dk", "Dv")
    params = parameters(without=BARE)
    mask = Mask.lengths(query=jnp.array([3, 5]), key_value=jnp.array([4, 7]))
    poisoned = [x[0].at[0, 3:].set(jnp.nan), *(y.at[0, 4:].set(jnp.nan) for y in x[1:])]

    def loss(params: MHAParams, x: Any) -> Any:
        (module, _) = linen.MultiHeadAttention.from_params(SMALL, rotate=unturned)
        tree = {name: getattr(params, name)._asdict() for name in ("query", "key", "value", "out")}
        return jnp.square(module.apply({"params": tree}, *x, mask=mask)).sum()

    grads = jax.jit(jax.grad(loss))
    clean, dirty = grads(params, x), grads(params, poisoned)
    chex.assert_tree_all_finite(clean)
    chex.assert_trees_all_equal(dirty, clean, strict=True)


CASES: tuple[tuple[str, ...], ...] = (
    (),
    BARE,
    (*BARE, "query.bias", "key.bias", "value.bias", "out.bias"),
    (*BARE, "key.bias"),
    (*BARE, "out.kernel", "out.bias"),
)


HEADS = ("query_norm_heads", "key_norm_heads"), ("gate_heads.kernel",)


@pytest.mark.parametrize(
    ("without", "forms"), [*((x, ()) for x in CASES), *((BARE, x) for x in HEADS)], ids=str
)
def test_parameters_come_back(without: tuple[str, ...], forms: tuple[str, ...]) -> None:
    held = leaves(parameters(without=without))
    other = {x: normal(x, tuple(SIZES[a] for a in CANONICAL[x].split())) for x in forms}
    params = from_leaves({**held, **other})
    norm: Any = None if params.query_norm is None else "layer"
    semantics = Semantics(
        fully_masked="nan", qk_norm=norm, dropout_rate=0.2, dropout_broadcast=("B",)
    )
    module, variables = linen.MultiHeadAttention.from_params(params, semantics, deterministic=True)
    layer = modules.MultiHeadAttention.from_params(params, semantics, deterministic=True)
    for back in (
        module.to_params(variables),
        module.bind(variables).to_params(),
        layer.to_params(),
    ):
        assert back[1] == semantics
        assert list(leaves(back[0])) == list(leaves(params))
        for name, array in leaves(params).items():
            assert_same(leaves(back[0])[name], array, name)
    x = features("Dq", "Dk", "Dv")
    declared = jax.eval_shape(module.init, jax.random.key(0), *x)
    assert structure(declared) == structure(variables)
    assert plain(declared).keys() == plain(variables).keys()
    expected = np.asarray(multi_head_attention(params, *x, semantics=semantics))
    for out in (module.apply(variables, *x), layer(*x)):
        assert_close(out, expected)


def test_norms_without_scales() -> None:
    semantics = Semantics(qk_norm="rms", qk_norm_learned=False)
    params, x = parameters(without=BARE), features("Dq", "Dk", "Dv")
    expected = np.asarray(multi_head_attention(params, *x, semantics=semantics))
    for layer in layers(params, semantics):
        assert_close(layer(*x), np.asarray(expected))


def test_an_import_from_torch_is_one_line() -> None:
    torch = pytest.importorskip("torch")

    extras = {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.1}
    layer = torch.nn.MultiheadAttention(12, 3, **extras, batch_first=True).eval()
    x = normal("torch", (B, T, 12))
    with torch.no_grad():
        expected = layer(*[torch.from_numpy(np.array(x))] * 3)[0].numpy()
    settings: dict[str, Any] = {"deterministic": True}
    module, variables = linen.MultiHeadAttention.from_params(
        *torch_converter.from_module(layer), **settings
    )
    assert_close(module.apply(variables, x), expected)
    other = modules.MultiHeadAttention.from_params(*torch_converter.from_module(layer), **settings)
    assert_close(other(x), expected)
    back = torch_converter.to_module(*other.to_params())
    for name, array in layer.state_dict().items():
        assert_same(back.state_dict()[name], array.numpy(), name)


def test_what_does_not_fit_is_refused(x64: None) -> None:
    with pytest.raises(ValueError, match="one needs the other"):
        linen.MultiHeadAttention.from_params(SMALL, Semantics(qk_norm="rms"))
    with pytest.raises(ValueError, match="pass variables"):
        linen.MultiHeadAttention(2).to_params()
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        modules.MultiHeadAttention(6, 12, num_kv_heads=4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="multiple of num_heads"):
        linen.MultiHeadAttention(5).init(jax.random.key(0), jnp.ones((T, 12)))
    double = jax.tree.map(lambda x: np.asarray(x, np.float64), SMALL)
    with jax.enable_x64(False):
        for cls in (linen.MultiHeadAttention, modules.MultiHeadAttention):
            with pytest.raises(TypeError, match="float64"):
                cls.from_params(double)


def test_cache_methods_are_those_of_the_core() -> None:
    (x,) = features("Dq")
    rotate, window = partial(rope, base=100.0), (3, 0)
    params = replace_widths(SMALL)
    cache = KVCache.empty(params, B, 8)
    module, variables = linen.MultiHeadAttention.from_params(
        params, rotate=rotate, local_window_size=window
    )
    other = modules.MultiHeadAttention.from_params(params, rotate=rotate, local_window_size=window)
    whole = np.asarray(other(x, is_causal=True))
    out, kept = module.apply(variables, x[:, :4], cache, method="prefill")
    assert_close(out, whole[:, :4])
    step = x[:, 4:]
    out, after = module.apply(variables, step, kept, method="decode_step")
    expected, last = decode_step(params, step, kept, mask=Mask.window(3, 0), rotate=rotate)
    assert_same(out, expected)
    assert_close(out, whole[:, 4:])
    for ours in (after, other.decode_step(step, other.prefill(x[:, :4], cache)[1])[1]):
        for a, e in zip(ours, last, strict=True):
            assert_same(a, e)


def replace_widths(params: MHAParams) -> MHAParams:
    """Output features as input features."""
    assert params.out is not None
    assert params.out.bias is not None
    return params._replace(out=Projection(params.out.kernel[..., :17], params.out.bias[:17]))


def test_settings_that_say_the_same_twice() -> None:
    (x,) = features("Dq")
    expected = multi_head_attention(SMALL, x, semantics=Semantics(scale=0.3))
    for layer in layers(SMALL, replace(Semantics(precision="highest"), scale=0.3)):
        assert_same(layer(x), expected)
