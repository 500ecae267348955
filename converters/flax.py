"""Imports and exports Flax linen.MultiHeadDotProductAttention and nnx.MultiHeadAttention.

Layers of `jaxmha.flax` are imported too.

The layers are called as (query, key, value). True in their masks means attend.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import numpy as np

from jaxmha import MHAParams, Semantics
from jaxmha.converters.discovery import flax_layers, live_model
from jaxmha.converters.discovery.flax_layers import (
    attention_layers,
    beyond_semantics,
    semantics_of,
)
from jaxmha.converters.discovery.live_model import flax as tensors_of
from jaxmha.converters.discovery.own_forward import Settings, refuse_own_forward, refuse_settings
from jaxmha.converters.layout.api import make_api
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.layout.flax import LAYOUTS, LINEN, LINEN_TIES, NNX_TIES
from jaxmha.converters.layout.validation import leaf_shapes, refuse_sizes
from jaxmha.converters.masks.flax import export_masks, import_masks
from jaxmha.converters.matching.load_into import make_load_into
from jaxmha.extras import needed
from jaxmha.params import check

if TYPE_CHECKING:
    from flax import linen, nnx

    from jaxmha.converters.discovery.flax_layers import Layer, LayerOrPair

__all__ = [
    "LAYOUTS",
    "LINEN",
    "LINEN_TIES",
    "NNX_TIES",
    "attention_layers",
    "export_masks",
    "export_params",
    "from_module",
    "import_masks",
    "import_params",
    "load_into",
    "tensors_of",
    "to_module",
]

import_params, export_params = make_api(LAYOUTS, traced=True)
load_into = make_load_into(
    "into_flax",
    "an nnx module, `(linen module, variables)`, or linen variables",
    "Fills an nnx module in place, or returns new linen variables.",
)


def from_module(
    module: "Layer", variables: Mapping[str, Any] | None = None
) -> tuple[MHAParams, Semantics]:
    """Parameters and semantics of an attention layer of flax, as copies, or of `jaxmha.flax`.

    `variables` is the tree of a linen module (`{"params": ...}`); an nnx module holds its own.

    Raises:
      TypeError: the module is not an attention layer.
      ValueError: a linen module without variables, weights that contradict `num_heads`, a
        function of the user's own in place of one of flax (`attention_fn`, `qkv_dot_general`, ...),
        a class that overrides `__call__`, a sublayer of another class, or a `rotate`.
    """
    with needed("flax"):
        from flax import linen, nnx

    of_flax = (nnx.MultiHeadAttention, linen.SelfAttention, linen.MultiHeadDotProductAttention)
    kinds = (*of_flax, *flax_layers.jaxmha_classes())
    if isinstance(module, kinds):
        instead = _instead(variables)
        refuse_own_forward(module, kinds, ["__call__"], instead)
        if isinstance(module, nnx.MultiHeadAttention):
            for name, own, _ in _sublayers(module):
                layer, path = getattr(module, name), f"module.{name}"
                flax_layers.refuse_adapter(layer, path)
                refuse_own_forward(layer, own, ["__call__"], instead, path)
    if more := beyond_semantics(module):
        raise ValueError(
            f"the {type(module).__name__} {more}, which semantics cannot hold: its weights and "
            "semantics alone are those of module.to_params"
        )
    return weights_of(module, variables)


def weights_of(
    module: "Layer", variables: Mapping[str, Any] | None = None
) -> tuple[MHAParams, Semantics]:
    """Parameters and semantics of an attention layer, even if it overrides `__call__`."""
    with needed("flax"):
        from flax import linen, nnx
        from flax.core import meta
        from flax.traverse_util import flatten_dict

    if isinstance(module, flax_layers.jaxmha_classes()):
        return flax_layers.read_jaxmha(module, variables)
    if isinstance(module, nnx.MultiHeadAttention):
        settings: Settings = {"attention_fn": (nnx.dot_product_attention,)}
        _check_sublayers(module)
        tree = _tree_of(module)
    elif isinstance(module, linen.MultiHeadDotProductAttention):
        if variables is None:
            raise ValueError("a linen module holds no weights: pass variables= as well")
        settings = {"attention_fn": (linen.dot_product_attention,), **_of_functions()}
        tree = meta.unbox(variables.get("params", variables))
    else:
        instead = ""
        if isinstance(module, nnx.Module) or variables is not None:
            given = "module" if variables is None else "module, variables"
            shown = f"jaxmha.converters.flax.tensors_of({given}).state"
            instead = live_model.by_hand(lambda: tensors_of(module, variables), shown)
        raise TypeError(
            "expected a flax linen.MultiHeadDotProductAttention or nnx.MultiHeadAttention, got "
            f"{type(module).__name__}: {instead or 'for a model take its layers, for a tree of arrays import_params'}"
        )
    if semantics_of(module.attention_fn) is not None:
        settings = {name: x for name, x in settings.items() if name != "attention_fn"}
    refuse_settings(module, settings, _instead(variables), "module")
    flat = {"/".join(map(str, path)): leaf for path, leaf in flatten_dict(dict(tree)).items()}
    params, semantics = import_params(flat, num_heads=module.num_heads)
    if module.normalize_qk != (params.query_norm is not None):
        raise ValueError(
            f"module.normalize_qk={module.normalize_qk}, but the tree has "
            f"{'no ' if params.query_norm is None else ''}query_ln and key_ln"
        )
    return params, flax_layers.flax_semantics(module, semantics)


def _tree_of(module: "nnx.MultiHeadAttention") -> dict[str, Any]:
    """The weights of an nnx module, each sublayer on its own.

    `nnx.state` of the whole module lists a sublayer that two names share once, and a frozen weight
    may be of any class of `nnx.Variable`.
    """
    from flax import nnx

    tree: dict[str, Any] = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    for name, *_ in _sublayers(module):
        layer = getattr(module, name)
        held = {leaf: getattr(layer, leaf, None) for leaf in ("kernel", "bias", "scale")}
        known = {leaf: x.get_value() for leaf, x in held.items() if x is not None}
        tree[name] = {**nnx.to_pure_dict(nnx.state(layer, nnx.Param)), **known}
    return tree


def _instead(variables: Mapping[str, Any] | None) -> str:
    """The call that reads the weights of a module without its behaviour, as text for messages."""
    given = "module" if variables is None else "module, variables"
    return f"import_params(tensors_of({given}).state, num_heads=...)"


def _of_functions() -> Settings:
    """Arguments of linen that replace a function -> the values that keep flax's own function."""
    product = (None, jax.lax.dot_general)
    return {
        "qkv_dot_general": product,
        "out_dot_general": product,
        "qkv_dot_general_cls": (None,),
        "out_dot_general_cls": (None,),
        "qk_attn_weights_einsum_cls": (None,),
        "attn_weights_value_einsum_cls": (None,),
    }


def _sublayers(module: "nnx.MultiHeadAttention") -> Iterator[tuple[str, tuple[Any, ...], Settings]]:
    """Name, expected classes and settings of each sublayer of an nnx module.

    The constructor makes sublayers of these classes; an assignment may put any other in their place.
    """
    from flax import nnx

    linear = {"dot_general": (None, jax.lax.dot_general), "dot_general_cls": (None,)}
    for name in ("query", "key", "value", "out"):
        axis = (-2, -1) if name == "out" else (-1,)
        yield name, (nnx.LinearGeneral,), {**linear, "axis": (axis,)}
    last = (-1, (-1,))
    across = {"axis_name": (None,), "axis_index_groups": (None,)}
    for name in ("query_ln", "key_ln") if module.normalize_qk else ():
        axes = {"reduction_axes": last, "feature_axes": last}
        yield name, (nnx.LayerNorm, nnx.RMSNorm), {**axes, **across}


@cache
def _promoting(kind: Any) -> Settings:
    """The default of `promote_dtype`; {} in older releases of flax, which lack this argument."""
    argument = signature(kind.__init__).parameters.get("promote_dtype")
    return {} if argument is None else {"promote_dtype": (argument.default,)}


def _check_sublayers(module: "nnx.MultiHeadAttention") -> None:
    """Raises ValueError if a sublayer of an nnx module is of another class, or has a setting that
    changes what it computes."""
    for name, kinds, settings in _sublayers(module):
        layer, path = getattr(module, name), f"module.{name}"
        flax_layers.refuse_adapter(layer, path)
        refuse_own_forward(layer, kinds, (), _instead(None), path)
        refuse_settings(layer, {**settings, **_promoting(kinds[0])}, _instead(None), path)
        if name.endswith("_ln"):
            flax_layers.refuse_norm(layer, path)


@overload
def to_module(
    params: MHAParams,
    semantics: Semantics = Semantics(),
    *,
    kind: Literal["nnx"] | None = None,
    like: "Layer | None" = None,
) -> "nnx.MultiHeadAttention": ...


@overload
def to_module(
    params: MHAParams,
    semantics: Semantics = Semantics(),
    *,
    kind: Literal["linen"],
    like: "Layer | None" = None,
) -> "tuple[linen.MultiHeadDotProductAttention, dict[str, Any]]": ...


def to_module(
    params: MHAParams,
    semantics: Semantics = Semantics(),
    *,
    kind: Literal["nnx", "linen"] | None = None,
    like: "Layer | None" = None,
) -> "LayerOrPair":
    """A layer with these weights: an `nnx.MultiHeadAttention` (the default), or with
    `kind="linen"` the pair `(linen.MultiHeadDotProductAttention, {"params": ...})`.

    `like`: a flax layer from which compute dtype, precision, `deterministic` and `decode` are
    copied. Without it, dropout is off (`deterministic=True`).

    Raises:
      ValueError: the layer cannot hold the parameters or the behaviour; the message says why.
    """
    import jax.numpy as jnp

    with needed("flax"):
        from flax import linen, nnx
        from flax.traverse_util import unflatten_dict

    if kind not in (None, "nnx", "linen"):
        raise ValueError(f"kind must be 'nnx' or 'linen', got {kind!r}")
    ties = LINEN_TIES if kind == "linen" else NNX_TIES
    own = replace(LINEN, name=f"flax {kind or 'nnx'}", ties={**LINEN.ties, **ties})
    sizes = check(params)
    refuse_sizes(own, sizes, leaf_shapes(params))
    if semantics.dropout_rate and semantics.dropout_broadcast not in ((), ("B", "N")):
        raise ValueError(
            "flax shares dropout over batch and heads or over nothing, and cannot hold "
            f"semantics.dropout_broadcast={semantics.dropout_broadcast}"
        )
    state = {
        tuple(key.split("/")): _exact(key, array)
        for key, array in export_params(params, semantics).items()
    }
    settings = _settings(params, semantics, sizes, like)
    settings["param_dtype"] = jnp.dtype(state["query", "kernel"].dtype)
    if kind == "linen":
        return linen.MultiHeadDotProductAttention(**settings), {"params": unflatten_dict(state)}
    kv_heads = None if sizes["K"] == sizes["N"] else sizes["K"]
    fresh = jax.random.key(0, impl="rbg")  # compiles fast; the weights are replaced below
    module = nnx.MultiHeadAttention(
        in_features=sizes["Dq"],
        in_kv_features=sizes["Dk"],
        num_kv_heads=kv_heads,
        rngs=nnx.Rngs(0, params=fresh),
        **settings,
    )
    variables_of = nnx.to_flat_state(nnx.state(module, nnx.Param))
    shapes = {path: variable.get_value().shape for path, variable in variables_of}
    assert shapes == {path: array.shape for path, array in state.items()}, shapes
    nnx.update(module, nnx.from_flat_state({p: v.replace(state[p]) for p, v in variables_of}))
    return module


def _settings(
    params: MHAParams, semantics: Semantics, sizes: Mapping[str, int], like: "Layer | None"
) -> dict[str, Any]:
    """Constructor arguments that both classes of flax share."""
    settings = {
        "num_heads": sizes["N"],
        "qkv_features": sizes["N"] * sizes["H"],
        "out_features": sizes["Do"],
        "use_bias": params.query.bias is not None,
        "normalize_qk": params.query_norm is not None,
        "dropout_rate": semantics.dropout_rate,
        "broadcast_dropout": bool(semantics.dropout_broadcast),
        "deterministic": True,
        "decode": False,
    }
    if like is None:
        return settings
    kept = ("dtype", "precision", "deterministic", "decode")
    return settings | {name: getattr(like, name) for name in kept if hasattr(like, name)}


def _exact(key: str, array: NDArray) -> jax.Array:
    moved: jax.Array = jax.device_put(np.array(array))  # `jnp.array` compiles one program per shape
    if moved.dtype != array.dtype:
        raise ValueError(
            f"JAX would keep {key} as {moved.dtype}, not {array.dtype}: call "
            "jax.config.update('jax_enable_x64', True)"
        )
    return moved


def forward(
    module: "LayerOrPair", query: NDArray, key: NDArray, value: NDArray, mask: NDArray | None = None
) -> NDArray:
    """Runs a layer (nnx, or a linen pair) on `(B, T, Dq)`, `(B, S, Dk)`, `(B, S, Dv)`.

    `mask` is canonical: Boolean `(B, N or 1, T or 1, S)`, True = attend. Dropout and the cache are
    off.
    """
    if isinstance(module, tuple):
        layer, variables = module
        layer = layer.clone(decode=False) if layer.decode else layer
        out = layer.apply(variables, query, key, value, mask=mask, deterministic=True)
    else:
        without_cache = {} if module.decode is False else {"decode": False}
        out = module(query, key, value, mask=mask, deterministic=True, **without_cache)
    return to_numpy(np.asarray(out))
