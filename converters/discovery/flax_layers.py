"""Attention layers of a flax model: those of flax, and those of `jaxmha.flax`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxmha import MHAParams, Semantics
from jaxmha.extras import needed
from jaxmha.semantics import NORM_FIELDS

if TYPE_CHECKING:
    from flax import linen, nnx

    Layer: TypeAlias = nnx.Module | linen.Module
    # A linen module holds no weights, so its variables are passed with it.
    LayerOrPair: TypeAlias = nnx.Module | tuple[linen.Module, Mapping[str, Any]]


def attention_layers(model: "LayerOrPair") -> Iterator[tuple[str, "LayerOrPair"]]:
    """Path and layer of every attention layer in an nnx model.

    For a linen module with its variables: the pair itself, at path "", if it is attention.
    """
    with needed("flax"):
        from flax import linen, nnx
    of_linen, of_nnx = jaxmha_classes()

    if isinstance(model, tuple):
        if isinstance(model[0], linen.MultiHeadDotProductAttention | of_linen):
            yield "", model
        return
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.MultiHeadAttention | of_nnx):
            yield "/".join(map(str, path)), module


def jaxmha_classes() -> tuple[Any, Any]:
    """The attention classes of `jaxmha.flax.linen` and `jaxmha.flax.nnx`, except latent attention."""
    from jaxmha.flax.linen import MultiHeadDotProductAttention
    from jaxmha.flax.nnx import MultiHeadAttention

    return MultiHeadDotProductAttention, MultiHeadAttention


def read_jaxmha(module: Any, variables: Mapping[str, Any] | None) -> tuple[MHAParams, Semantics]:
    """Parameters and semantics (with the window) of a layer of `jaxmha.flax`.

    They do not hold its `rotate`, which `beyond_semantics` describes.
    """
    if isinstance(module, jaxmha_classes()[1]):
        params, _ = module.to_params()
    elif variables is None:
        raise ValueError("a linen module holds no weights: pass variables= as well")
    else:
        params, _ = module.to_params({"params": variables.get("params", variables)})
    return params, jaxmha_semantics(module)


def jaxmha_semantics(module: Any) -> Semantics:
    """The semantics of a layer of `jaxmha.flax`, with its window."""
    from jaxmha.flax.settings import read_mask

    nnx = jaxmha_classes()[1]
    own: Semantics = module.semantics if isinstance(module, nnx) else module._semantics()
    window = read_mask(None, module.local_window_size, semantics=own).window_size
    return replace(own, local_window_size=window)


def flax_semantics(module: Any, given: Semantics) -> Semantics:
    """Adds the settings of an attention layer of flax to `given`, which has the norms of its layout.

    Raises ValueError if the norms of queries and keys differ.
    """
    from flax import nnx

    if (own := semantics_of(module.attention_fn)) is not None:
        given = replace(own, **{name: getattr(given, name) for name in NORM_FIELDS})
    shared = ("B", "N") if module.broadcast_dropout and module.dropout_rate else ()
    rate = float(module.dropout_rate)
    given = replace(given, dropout_rate=rate, dropout_broadcast=shared)
    if not (isinstance(module, nnx.Module) and module.normalize_qk):
        return given  # norms of linen's layer have no settings, so `given` describes them
    norms: dict[str, dict[str, Any]] = {
        name: {
            "qk_norm": "rms" if isinstance(layer, nnx.RMSNorm) else "layer",
            "qk_norm_epsilon": float(layer.epsilon),
        }
        for name, layer in (("query_ln", module.query_ln), ("key_ln", module.key_ln))
    }
    if norms["query_ln"] != norms["key_ln"]:
        raise ValueError(
            f"module.query_ln and module.key_ln differ, {norms}: jaxmha has one kind of norm and one "
            "epsilon for both"
        )
    return replace(given, **norms["query_ln"])


def beyond_semantics(module: Any) -> str | None:
    """Describes a computation that neither parameters nor semantics of a layer hold; None: none."""
    if not isinstance(module, jaxmha_classes()) or module.rotate is None:
        return None
    return "rotates its queries and keys (rotate)"


# Arguments of `jaxmha.flax.attention_fn` that semantics hold, or that change no output.
_HELD = {"semantics", "implementation"}


def semantics_of(function: object) -> Semantics | None:
    """The semantics of a function that is `jaxmha.flax.attention_fn`, or a partial of it.

    None for any other function, and for a partial with arguments that semantics cannot hold.
    """
    from jaxmha.flax import attention_fn

    if function is attention_fn:
        return Semantics()
    if not isinstance(function, partial) or function.func is not attention_fn or function.args:
        return None
    given = function.keywords
    return given.get("semantics", Semantics()) if given.keys() <= _HELD else None


def by_jaxmha(module: Any) -> bool:
    """True if jaxmha computes the attention of a layer."""
    own = isinstance(module, jaxmha_classes())
    return own or semantics_of(getattr(module, "attention_fn", None)) is not None


def refuse_latent(module: object) -> None:
    """Raises TypeError, with the remedy, for a layer of latent attention."""
    from jaxmha.flax.latent import linen, nnx

    if isinstance(module, linen.LatentAttention | nnx.LatentAttention):
        raise TypeError(
            "latent attention has no MHAParams: jaxmha.converters.matching.prove(source, model, "
            "inputs=...) compares the arrays of two such layers, and runs both"
        )


def refuse_adapter(layer: object, path: str) -> None:
    """Raises ValueError, with the remedy, for a sublayer of nnx with a low-rank adapter."""
    from flax import nnx

    if not isinstance(layer, nnx.LoRALinear | nnx.LoRA):
        return
    base, lora = ("", ".lora") if isinstance(layer, nnx.LoRALinear) else (".base_module", "")
    raise ValueError(
        f"{path} is a {type(layer).__name__}, whose adapter no layout holds: put an "
        f"nnx.LinearGeneral in its place, with the bias of {path}{base} and the kernel "
        f"{path}{base}.kernel + ({path}{lora}.lora_a @ {path}{lora}.lora_b).reshape("
        f"{path}{base}.kernel.shape), both in the shapes of a LinearGeneral"
    )


def refuse_norm(layer: Any, path: str) -> None:
    """Raises ValueError, with the remedy, for a norm of nnx that lacks a scale or has a bias."""
    if getattr(layer, "scale", None) is None:
        raise ValueError(
            f"{path} has no scale (use_scale=False), and the norms of jaxmha have one: ones compute "
            f"the same, {path}.scale = nnx.Param(jnp.ones({layer.num_features}))"
        )
    if getattr(layer, "bias", None) is not None:
        raise ValueError(
            f"{path} has a bias (use_bias=True), and the norms of jaxmha have none: only if it is "
            f"zero, leave it out, {path}.bias = None"
        )
