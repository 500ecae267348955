"""Settings of a layer that differ from those of its part of a model, such as its head count."""

from collections.abc import Mapping
from typing import Any

from jaxmha.checkpoint.errors import shown

# Key of any configuration of transformers: index of a layer -> the settings of this layer alone.
_PER_LAYER = "per_layer_config"
# Key of settings of layers with a window in the authors' own files of Step 3.5.
_OLDER = "attention_other_setting"
OF_LAYERS = {_PER_LAYER, _OLDER}  # nested settings of single layers, not of a part of the model
_HEADS, _WIDTH = "num_attention_heads", "head_dim"
_LISTED = "num_attention_heads_per_layer"  # a list, in configurations of Laguna
# Model type -> the kind of layer that has settings of its own, and for each of them its key and the
# default of its class (None: as in other layers).
_Keys = dict[str, tuple[str, int | None]]
_OF_KINDS: dict[str, tuple[str, _Keys]] = {
    **dict.fromkeys(
        ("diffusion_gemma_text", "embedding_gemma2_text", "gemma4_text", "gemma4_unified_text"),
        ("full", {_WIDTH: ("global_head_dim", 512)}),
    ),
    "inkling2_text": ("sliding", {_HEADS: ("swa_num_attention_heads", 48), _WIDTH: ("swa_head_dim", 128)}),
    "inkling_text": ("sliding", {_HEADS: ("swa_num_attention_heads", 64), _WIDTH: ("swa_head_dim", 128)}),
    "step3p5": ("sliding", {_HEADS: ("num_sliding_attention_heads", None)}),
}  # fmt: skip


def of(own: Mapping[str, Any], model_type: str, layer: int) -> Mapping[str, Any]:
    """The settings by which a layer differs from its part of a model, whose settings are `own`.

    Raises:
      ValueError: they follow from the kind of the layer, and `own` does not give its kind.

    >>> of({"layer_types": ["hybrid", "hybrid_sliding"], "swa_head_dim": 8}, "inkling_text", 1)
    {'num_attention_heads': 64, 'head_dim': 8}
    """
    alone, listed = own.get(_PER_LAYER), own.get(_LISTED)
    if isinstance(alone, dict):
        settings = alone.get(str(layer))
        return settings if isinstance(settings, dict) else {}
    if isinstance(listed, list) and layer < len(listed):
        return {_HEADS: listed[layer]}
    which, found = _of_kind(own, model_type)
    return found if found and which in _kind(own, layer) else {}


def _of_kind(own: Mapping[str, Any], model_type: str) -> tuple[str, Mapping[str, Any]]:
    """The kind of layer that has settings of its own in a model type, and these settings.

    The settings are {} if they do not differ from those of other layers, or there is no such kind.
    """
    which, keys = _OF_KINDS.get(model_type, ("", {}))
    older = own.get(_OLDER)
    given = older if isinstance(older, dict) else {}
    found = {one: own.get(key, given.get(one, default)) for one, (key, default) in keys.items()}
    return which, {one: x for one, x in found.items() if x is not None and x != own.get(one)}


def _kind(own: Mapping[str, Any], layer: int) -> str:
    """The kind of a layer in a model that has layers with and without a window.

    Raises ValueError if no list in the configuration has the layer.
    """
    kinds, local = own.get("layer_types"), own.get("local_layer_ids")
    if isinstance(kinds, list) and layer < len(kinds):
        return str(kinds[layer])
    if isinstance(local, list):
        return "sliding" if layer in local else "full"
    raise ValueError(f"layer_types have no layer {layer}, whose heads depend on its kind")


def heads(own: Mapping[str, Any], model_type: str, key: str) -> tuple[tuple[int, int], ...]:
    """Pairs of a layer and its head count, for the layers whose count is not the one under `key`.

    Raises:
      ValueError: a count is not positive, or `of` raises for a layer.
    """
    alone, local = own.get(_PER_LAYER), own.get("local_layer_ids")
    layers = (
        {int(n) for n in map(str, alone) if n.isdecimal()}
        if isinstance(alone, dict)
        else set[int]()
    )
    for listed in (own.get(_LISTED), own.get("layer_types")):
        layers |= set(range(len(listed))) if isinstance(listed, list) else set()
    layers |= {n for n in local if type(n) is int} if isinstance(local, list) else set()
    if not layers and key in _of_kind(own, model_type)[1]:
        layers = {0}  # nothing lists the layers, so `of` raises
    found = {n: of(own, model_type, n).get(key, own[key]) for n in sorted(layers)}
    for layer, count in found.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"the head count of layer {layer} is {shown(count)}")
    return tuple((layer, count) for layer, count in found.items() if count != own[key])
