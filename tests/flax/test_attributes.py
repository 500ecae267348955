"""A change of a module after its construction is honoured, or refused by name."""

import inspect
import pickle
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmha import KVCache, Semantics, rope
from jaxmha.flax import attention_fn, linen
from jaxmha.flax.latent import linen as linen_latent
from jaxmha.flax.latent.nnx import LatentAttention
from jaxmha.flax.nnx import MultiHeadAttention
from jaxmha.flax.settings import read_inputs
from jaxmha.latent import LatentCache, ScaledQueries
from jaxmha.rotary import static_rotation
from tests.drawn import to_jax
from tests.flax.common import N, by_numpy, normal, randomise, theirs
from tests.tolerance import assert_same

FEATURES = 17
DRAWN = {"kernel_init": by_numpy}
SIZES: dict[str, Any] = {
    "num_heads": N, "in_features": FEATURES, "qkv_features": 5 * N, **DRAWN,
}  # fmt: skip
LATENT: dict[str, Any] = {"latent_dim": 5, "rotary_dim": 4, "head_dim": 6, **DRAWN}


def layer(**more: Any) -> Any:
    return MultiHeadAttention(**SIZES, **more, rngs=nnx.Rngs(0))


def test_dropout_changes_as_in_flax() -> None:
    x = normal("x", (2, 5, FEATURES))
    dropping, still = layer(dropout_rate=0.5, deterministic=False), layer()
    nnx.update(still, nnx.state(dropping, nnx.Param))
    assert jnp.abs(dropping(x) - still(x)).max() > 0.1
    dropping.set_attributes(dropout_rate=0.0)
    assert_same(dropping(x), still(x))
    assert dropping.to_params()[1].dropout_rate == 0
    dropping.dropout_rate = 0.5
    assert dropping.semantics == Semantics(dropout_rate=0.5, dropout_broadcast=("B", "N"))
    assert jnp.abs(dropping(x) - still(x)).max() > 0.1
    dropping.semantics = Semantics()
    assert dropping.dropout_rate == 0
    still.set_attributes(dropout_rate=0.5, deterministic=False)
    with pytest.raises(ValueError, match="rngs: dropout needs them in the call"):
        still(x)
    with pytest.raises(ValueError, match="dropout_rate"):
        still.dropout_rate = 1.5


def test_attributes_of_flax() -> None:
    module = layer(dropout_rate=0.1, use_bias=False, normalize_qk=True)
    assert (module.broadcast_dropout, module.precision) == (True, None)
    assert (module.normalize_qk, module.use_bias) == (True, False)
    assert module.attention_fn is attention_fn
    module.set_attributes(broadcast_dropout=False)
    fresh = layer(dropout_rate=0.1, use_bias=False, normalize_qk=True, broadcast_dropout=False)
    assert nnx.graphdef(module) == nnx.graphdef(fresh)
    module.precision = "highest"
    assert (module.broadcast_dropout, module.precision) == (False, "highest")
    expected = Semantics(
        dropout_rate=0.1, dropout_broadcast=(), precision="highest", qk_norm="layer"
    )
    assert module.to_params()[1] == expected
    assert layer(use_bias=("key", "out")).use_bias == ("key", "out")
    for name in ("normalize_qk", "use_bias", "attention_fn"):
        with pytest.raises(AttributeError, match=f"{name} cannot change"):
            setattr(module, name, None)


class Wrapped(nnx.Module):  # type: ignore[misc]
    """As adapters are: it has what its inner layer has, and adds to what it gives."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.bias = inner, None
        self.kernel = self.scale = getattr(inner, "kernel", getattr(inner, "scale", None))

    def __call__(self, x: Any) -> Any:
        return self.inner(x) + 1


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("query", "dot_general", jax.lax.dot_general),
        ("key", "dot_general_cls", print),
        ("value", "promote_dtype", print),
        ("out", "preferred_element_type", np.float32),
        ("query_ln", "epsilon", 1.0),
        ("key_ln", "promote_dtype", print),
    ],
)
def test_what_acts_in_calls_of_a_submodule_is_refused(name: str, setting: str, value: Any) -> None:
    module = layer(normalize_qk=True)
    setattr(getattr(module, name), setting, value)
    with pytest.raises(ValueError, match=f"{name}.{setting} was changed"):
        module(jnp.ones((2, 5, FEATURES)))


@pytest.mark.parametrize("name", ["query", "key", "value", "out", "query_ln", "key_ln"])
def test_a_submodule_of_another_type_is_refused(name: str) -> None:
    module = layer(normalize_qk=True)
    setattr(module, name, Wrapped(getattr(module, name)))
    with pytest.raises(TypeError, match=f"{name} must be an nnx.*got Wrapped"):
        module(jnp.ones((2, 5, FEATURES)))
    with pytest.raises(TypeError, match=f"{name} must be an nnx"):
        module.to_params()


def test_a_sequence_of_implementations_is_hashable() -> None:
    module = linen.MultiHeadAttention(num_heads=N, implementation=["reference"])
    assert hash(module) == hash(module.clone(implementation=("reference",)))
    assert module.clone(implementation=["blocked", "reference"]).implementation == (
        "blocked",
        "reference",
    )


@pytest.mark.parametrize(
    ("arguments", "semantics"),
    [
        ({"broadcast_dropout": True}, Semantics(dropout_broadcast=("B",))),
        ({"broadcast_dropout": False}, Semantics(dropout_broadcast=("B", "N"))),
        ({"normalize_qk": True}, Semantics(qk_norm="rms")),
        ({"dropout_rate": 0.2}, Semantics(dropout_rate=0.1)),
        ({"precision": "high"}, Semantics(precision="highest")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_given_twice_agree(arguments: dict[str, Any], semantics: Semantics) -> None:
    with pytest.raises(ValueError, match="of semantics differ: give one"):
        layer(**arguments, semantics=semantics)
    module = linen.MultiHeadAttention(N, **arguments, semantics=semantics)
    with pytest.raises(ValueError, match="of semantics differ: give one"):
        jax.eval_shape(module.init, jax.random.key(0), jnp.ones((5, N)))
    same = layer(**arguments).semantics
    assert layer(**arguments, semantics=same).semantics == same


def test_a_precision_is_the_same_by_name() -> None:
    both = layer(precision="highest", semantics=Semantics(precision=jax.lax.Precision.HIGHEST))
    assert both.semantics.precision == "highest"
    assert Semantics(precision="float32") == Semantics(precision=jax.lax.Precision.HIGHEST)
    assert Semantics(precision="F32_F32_F32").precision == "F32_F32_F32"  # an algorithm of XLA's


def test_a_softmax_in_another_dtype_is_not_forced() -> None:
    module = linen.MultiHeadAttention(
        N, force_fp32_for_softmax=True, semantics=Semantics(softmax_dtype="float64")
    )
    with pytest.raises(ValueError, match=r"softmax_dtype=.*of semantics differ"):
        jax.eval_shape(module.init, jax.random.key(0), jnp.ones((5, N)))


def test_flax_describes_a_view() -> None:
    """Of every argument, in the words of flax's own module or others."""
    info = nnx.view_info(layer())
    for name in inspect.signature(MultiHeadAttention.set_view).parameters:
        assert name == "self" or f"  {name}: " in info
    assert "what `nnx.view` calls" not in info


def test_submodules_have_the_dtype_of_the_computation() -> None:
    module = layer(dtype=jnp.bfloat16, precision="highest", normalize_qk=True)
    for held in (module.query, module.key, module.value):
        assert theirs(held, jnp.ones((2, FEATURES))).dtype == jnp.bfloat16
        assert held.precision == "highest"
    assert theirs(module.query_ln, jnp.ones((2, 5))).dtype == jnp.bfloat16
    assert theirs(module.out, jnp.ones((2, N, 5))).dtype == jnp.bfloat16


def test_linen_shows_the_layer_alone() -> None:
    """Submodules hold parameters, and are not called."""
    x = normal("x", (2, 5, FEATURES))
    module = linen.MultiHeadAttention(num_heads=N, qkv_features=5 * N, normalize_qk=True)
    variables = randomise(jax.eval_shape(module.init, jax.random.key(0), x))
    out, seen = module.apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
    assert list(seen["intermediates"]) == ["__call__"]
    _, everything = module.apply(
        variables, x, capture_intermediates=lambda *_: True, mutable=["intermediates"]
    )
    names = {"query", "key", "value", "out", "query_ln", "key_ln"}
    assert set(everything["intermediates"]) == {"__call__", *names}  # they declare parameters
    assert_same(seen["intermediates"]["__call__"][0], out)
    table = module.tabulate(jax.random.key(0), x, console_kwargs={"width": 200})
    count = sum(leaf.size for leaf in jax.tree.leaves(variables))
    assert f"Total Parameters: {count:,}" in table


WRONG: dict[str, tuple[Any, ...]] = {
    "num_heads": (0, 3.0, True),
    "num_kv_heads": (0, 1.0),
    "value_head_dim": (0, -3, 2.5),
    "qkv_features": (-3, 15.0),
    "out_features": (-7, 7.0),
    "use_bias": (None, "query", ("q",), ["key", "values"], 1),
    "broadcast_dropout": ("yes", 2),
    "precision": ("highst", 3, ("high", "highst")),
    "local_window_size": ((1, 2, 3),),
}


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("name", ["in_features", "in_kv_features"])
@pytest.mark.parametrize("wrong", [0, 17.0])
def test_wrong_widths_are_named(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {wrong}"):
        MultiHeadAttention(**{**SIZES, name: wrong}, rngs=nnx.Rngs(0))


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("name", "wrong"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_wrong_arguments_are_named(name: str, wrong: Any) -> None:
    x, settings = jnp.ones((2, 5, FEATURES)), {**SIZES, name: wrong}
    with pytest.raises(ValueError, match=f"{name} must be .*, got "):
        MultiHeadAttention(**settings, rngs=nnx.Rngs(0))(x)
    del settings["in_features"]
    with pytest.raises(ValueError, match=f"{name} must be .*, got "):
        jax.eval_shape(linen.MultiHeadAttention(**settings).init, jax.random.key(0), x)


def test_what_may_be_a_list_or_a_set(no_shape_hook: None) -> None:
    """Modules stay static attributes and arguments of transformations."""
    x = normal("x", (2, 5, FEATURES))
    listed = layer(local_window_size=[2, 0], use_bias={"value", "key"})
    module = layer(local_window_size=(2, 0), use_bias=("key", "value"))
    assert nnx.graphdef(listed) == nnx.graphdef(module)
    assert_same(jax.jit(lambda m, x: m(x))(listed, x), module(x))
    inner = linen.MultiHeadAttention(N, local_window_size=[2, 0], use_bias=["key", "value"])
    again = linen.MultiHeadAttention(N, local_window_size=(2, 0), use_bias=("key", "value"))
    assert inner == again
    assert hash(inner) == hash(again)
    assert layer(use_bias=np.True_).use_bias is True
    params = layer(use_bias=("query", "key"), extra_params=("sinks", "gate.kernel")).to_params()[0]
    same: Any = {
        "extra_params": ["gate.kernel", "sinks"],
        "num_kv_heads": None,
        "param_dtype": "f4",
    }
    rebuilt = MultiHeadAttention.from_params(params, use_bias={"query", "key"}, **same)
    assert rebuilt.use_bias == ("query", "key")
    every = {"query", "key", "value", "out"}
    assert MultiHeadAttention.from_params(layer().to_params()[0], use_bias=every).use_bias is True
    for wrong in (True, ("key",)):
        with pytest.raises(ValueError, match=r"use_bias=.* is not that of the parameters"):
            MultiHeadAttention.from_params(params, use_bias=wrong)


@pytest.mark.parametrize("name", ["in_features", "in_kv_features", "kernel_init"])
def test_settings_that_parameters_give_are_refused(name: str) -> None:
    settings: Any = {name: FEATURES}
    latent = LatentAttention(N, FEATURES, **LATENT, rngs=nnx.Rngs(0))
    for module in (layer(), latent)[: 2 - (name == "in_kv_features")]:
        with pytest.raises(ValueError, match=f"{name} is that of the parameters"):
            type(module).from_params(module.to_params()[0], **settings)


def test_things_of_another_kind_are_named(no_shape_hook: None) -> None:
    x = jnp.ones((2, 5, FEATURES))
    rows: list[list[float]] = [[1.0] * FEATURES]
    dropping = layer(dropout_rate=0.5, deterministic=False)
    key = jax.random.key(0)
    assert_same(dropping(x, rngs=lambda: key), dropping(x, rngs=lambda: key))
    for rngs in (3, key):
        with pytest.raises(TypeError, match=r"rngs must be nnx\.Rngs or an nnx\.RngStream"):
            dropping(x, rngs=rngs)
    heads = jnp.ones((2, 5, N, 7))
    with pytest.raises(TypeError, match="one PRNG key for dropout"):
        attention_fn(heads, heads, heads, dropout_rng=3, dropout_rate=0.5)  # type: ignore[arg-type]
    classes: Any = (linen.MultiHeadAttention, MultiHeadAttention)
    for cls in classes:
        with pytest.raises(TypeError, match=r"params must be a jaxmha\.MHAParams, got dict"):
            cls.from_params({"a": 1})
        with pytest.raises(TypeError, match=r"semantics must be a jaxmha\.Semantics, got str"):
            cls.from_params(dropping.to_params()[0], "torch")
    for dtype in (None, "float32"):
        with pytest.raises(TypeError, match="inputs_q must be an array, got list"):
            layer(dtype=dtype)(rows)
        with pytest.raises(TypeError, match="inputs_k must be an array, got list"):
            linen.MultiHeadAttention(N, dtype=dtype).init(jax.random.key(0), x, rows)
    with pytest.raises(ValueError, match="precision must be"):
        dropping.precision = "highst"


def test_inputs_that_flax_takes_and_jaxmha_does_not(no_shape_hook: None) -> None:
    """As the list of differences says."""
    x, heads = jnp.ones((2, 5, FEATURES)), jnp.ones((2, 5, N, 5))
    with pytest.raises(TypeError, match="query"):
        layer()(x.astype(np.int32))
    for name, more in (("inputs_q", ()), ("inputs_v", (x, x))):
        with pytest.raises(TypeError, match=f"{name} must not be Boolean"):
            layer(dtype="float32")(*more, x.astype(bool))
    latent = LatentAttention(N, FEATURES, **LATENT, dtype="float32", rngs=nnx.Rngs(0))
    given = (
        LatentCache.empty(latent.to_params()[0], 2, 5),
        KVCache.empty(layer().to_params()[0], 2, 5),
    )
    for call in (
        latent,
        partial(latent.prefill, cache=given[0]),
        partial(layer(dtype="float32").prefill, cache=given[1]),
        lambda _: attention_fn(heads, heads, heads > 0, dtype="float32"),
    ):
        with pytest.raises(TypeError, match=r"(inputs|value) must not be Boolean"):
            call(x > 0)
    with pytest.raises(TypeError, match="mask must be an array"):
        linen.MultiHeadAttention(num_heads=N, qkv_features=5 * N).init(
            nnx.Rngs(0).params(), x, mask=True
        )
    with pytest.raises(TypeError, match="mask must be an array"):
        attention_fn(heads, heads, heads, mask=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_inputs_are_cast_to_the_dtype_that_is_given(dtype: Any, no_shape_hook: None) -> None:
    x = np.arange(2 * 5 * FEATURES).reshape(2, 5, FEATURES) % 7
    module = layer(dtype=jnp.float32)
    assert_same(module(x.astype(dtype)), module(to_jax(x, jnp.float32)))


def test_one_input_stays_one() -> None:
    """So that it is recognised as self-attention."""
    x, y = jnp.ones((2, 5, FEATURES)), jnp.ones((2, 5, FEATURES))
    query, key, value = read_inputs(x, None, None, jnp.bfloat16)
    assert query is key is value
    assert query.dtype == jnp.bfloat16
    query, key, value = read_inputs(x, y, None, jnp.bfloat16)
    assert query is not key
    assert key is value


def test_flax_names_its_default_product() -> None:
    """Which is no hook."""
    x, product = normal("x", (2, 5, FEATURES)), jax.lax.dot_general
    named = layer(qkv_dot_general=product, out_dot_general=product)
    assert_same(named(x), layer()(x))
    module = linen.MultiHeadAttention(N, qkv_features=5 * N, qkv_dot_general=product)
    jax.eval_shape(module.init, jax.random.key(0), x)


@pytest.mark.everyday(precision=["high", None])
@pytest.mark.parametrize("precision", ["default", "high", None])
def test_the_precision_is_that_of_every_product(precision: Any) -> None:
    x, heads = jnp.ones((2, 5, FEATURES)), jnp.ones((2, 5, N, 7))
    given: dict[str, Any] = {"precision": precision, "implementation": "blocked"}
    module = linen.MultiHeadAttention(N, qkv_features=5 * N, **given)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    calls = (
        jax.make_jaxpr(module.apply)(variables, x),
        jax.make_jaxpr(layer(**given))(x),
        jax.make_jaxpr(partial(attention_fn, **given))(heads, heads, heads),
    )
    for program in calls:
        found = re.findall(r"precision=(\(.*?\)|\S+)", str(program))
        name = f"Precision.{(precision or 'highest').upper()}"
        assert found
        assert {each.count(name) for each in found} == {2}, found


@pytest.mark.parametrize(
    "make",
    [
        lambda rotate: nnx.graphdef(layer(rotate=rotate)),
        lambda rotate: nnx.graphdef(
            LatentAttention(N, FEATURES, **LATENT, rotate=rotate, rngs=nnx.Rngs(0))
        ),
        lambda rotate: linen.MultiHeadDotProductAttention(N, rotate=rotate),
        lambda rotate: linen_latent.LatentAttention(N, **LATENT, rotate=rotate),
    ],
    ids=["nnx", "nnx_latent", "linen", "linen_latent"],
)
def test_modules_made_alike_are_equal(make: Any, no_shape_hook: None) -> None:
    """So that one compiled program serves them all; partials compare by identity."""

    def rotation(base: float) -> Any:
        return partial(rope, base=base, frequencies=None)

    assert make(rotation(50.0)) == make(rotation(50.0))
    assert hash(make(rotation(50.0))) == hash(make(rotation(50.0)))
    assert make(rotation(50.0)) != make(rotation(60.0))
    again = pickle.loads(pickle.dumps(static_rotation(rotation(50.0))))
    assert make(again) == make(rotation(50.0))
    with pytest.raises(TypeError, match="rotate must be a function rotate"):
        make("rope")


def test_equal_rotations_of_latent_modules() -> None:
    def rotation() -> Any:
        return ScaledQueries(partial(rope, base=50.0), 0.7, 3.0)

    made = [linen_latent.LatentAttention(N, **LATENT, rotate=rotation()) for _ in range(2)]
    assert made[0] == made[1]


def test_a_rotation_that_is_set_is_equal_too() -> None:
    module, fresh = layer(), layer(rotate=partial(rope, base=50.0))
    module.rotate = partial(rope, base=50.0)
    assert nnx.graphdef(module) == nnx.graphdef(fresh)
    assert module.rotate.keywords == {"base": 50.0}


def test_a_rotation_of_latents_is_none_of_heads() -> None:
    """It scales queries of latent attention; linen refuses it too."""
    with pytest.raises(TypeError, match="rotate must be a function rotate"):
        layer(rotate=ScaledQueries(rope, 0.7, 3.0))


@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_parameters_of_an_abstract_module(kind: str) -> None:
    """`nnx.eval_shape` has a module of shapes, from which shardings and explanations are made."""

    def make() -> Any:
        if kind == "heads":
            return layer()
        return LatentAttention(N, FEATURES, **LATENT, rngs=nnx.Rngs(0))

    shapes, _ = nnx.eval_shape(make).to_params()
    params, _ = make().to_params()
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    assert isinstance(shapes.query.kernel, jax.ShapeDtypeStruct)
