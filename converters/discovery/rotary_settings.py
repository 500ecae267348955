"""RoPE parameters of a layer, from a configuration of any version of transformers.

The configuration classes of transformers 5.23 decide which keys hold, and have the defaults of
missing ones (`rotary_defaults`).
"""

from collections.abc import Mapping
from typing import Any

from jaxmha import rotary_frequencies
from jaxmha.converters.discovery import layer_kinds
from jaxmha.converters.discovery.rotary_defaults import (
    BASE_KEYS,
    BASE_OF_LAYER,
    BASES,
    BY_KIND,
    FILLED,
    NEEDED,
    OF_KINDS,
    PARTIAL,
    RENAMED,
    SHARE_KEYS,
    SHARES,
    UNSCALED,
    WITH_DIMS,
    Bases,
)

_SHARE, _BEFORE = "partial_rotary_factor", "original_max_position_embeddings"


def of(own: Mapping[str, Any], model_type: str, layer: int | None) -> dict[str, Any]:
    """The RoPE parameters of a layer of a model type.

    Raises:
      TypeError: the configuration holds something else than an object under the key for them.
      ValueError: the configuration does not determine them.
    """
    rule = BY_KIND.get(model_type)
    given = (
        _given(own, model_type, layer)
        if rule is None
        else _by_rule(own, rule, layer_kinds.of(own, model_type, layer))
    )
    found = {key: value for key, value in given.items() if value is not None}
    found.setdefault("rope_theta", _base(own, model_type))
    rows = own.get("layer_rope_theta") if model_type in BASE_OF_LAYER else None
    if isinstance(rows, list) and layer is not None and layer < len(rows):
        found["rope_theta"] = rows[layer]
    if found.get(_SHARE) is None and (share := _share(own, model_type)) is not None:
        found[_SHARE] = share
    kind = found.get("rope_type") or found.get("type") or "default"
    found["rope_type"] = RENAMED.get(model_type, {}).get(kind, kind)
    before = own.get(_BEFORE)
    if before is not None and rule is None and model_type not in OF_KINDS:
        found[_BEFORE] = before  # goes before the value in the RoPE parameters
    else:
        found.setdefault(_BEFORE, own.get("max_position_embeddings"))
    return found


def frequencies(
    own: Mapping[str, Any], rope: Mapping[str, Any], model_type: str, width: int, length: int = 0
) -> rotary_frequencies.Frequencies:
    """The frequencies of heads of a width, given the RoPE parameters of their layer.

    `length`: the longest sequence, on which the frequencies of rope types dynamic and longrope
    depend; 0: the trained length.

    Raises:
      ValueError: no model of this type rotates heads in this way, or a parameter is out of its range.
      KeyError: a parameter is missing.
    """
    kind, share = rope["rope_type"], rope.get(_SHARE)
    # `partial_rotary_factor` takes precedence over `rotary_dim` if the class reads it.
    first = model_type in WITH_DIMS and (share is None or model_type not in PARTIAL)
    dims = own.get("rotary_dim") if first else None
    if kind == "proportional":
        dims = width  # pairs cover the whole head; the last ones have frequency 0
    elif type(dims) is not int:
        dims = int(width * float(1 if share is None else share))
        if model_type not in PARTIAL and dims != width:
            if kind != "default":
                raise ValueError(f"{_SHARE} is {share}, and its heads are rotated as a whole")
            dims = width
    if not 0 < dims <= width:
        raise ValueError(f"{dims} of {width} features cannot be rotary")
    most = float(own.get("max_position_embeddings") or 0)
    return rotary_frequencies.of(rope, dims, most, length)


def trained_length(own: Mapping[str, Any], rope: Mapping[str, Any]) -> int | None:
    """The longest sequence for which `frequencies` of length=0 hold; None: there is no limit."""
    if rope["rope_type"] == "longrope":
        return int(rope["original_max_position_embeddings"])
    most = own.get("max_position_embeddings") if rope["rope_type"] == "dynamic" else None
    return int(most) if most else None


def _object(own: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The parameters under a key; empty if there are none."""
    found = own.get(key) or {}
    if not isinstance(found, Mapping):
        raise TypeError(f"{key} is no object: {str(found)[:40]}")
    return found


def _given(own: Mapping[str, Any], model_type: str, layer: int | None) -> Mapping[str, Any]:
    """The RoPE parameters that a configuration, or else the class of its model type, gives.

    If each kind of layer has its own: those of the kind of `layer`.
    """
    scaling = {} if model_type in UNSCALED else _object(own, "rope_scaling")
    given = scaling or _object(own, "rope_parameters")
    if not given and model_type in NEEDED:
        raise ValueError("rope_parameters of the configuration are missing")
    given = given or FILLED.get(model_type, {})
    by_kind = any(isinstance(x, Mapping) for x in given.values())
    if not by_kind and model_type in OF_KINDS:
        raise ValueError("rope_parameters of the configuration are not those of kinds of layers")
    if by_kind and model_type not in OF_KINDS:
        raise ValueError(
            "rope_parameters are those of kinds of layers, and its layers share theirs"
        )
    if not by_kind:
        return given
    kind = layer_kinds.of(own, model_type, layer)
    if not kind and layer_kinds.FULL not in given and len(given) > 1:
        raise ValueError("layer_types of the configuration are missing")
    kind = kind or (layer_kinds.FULL if layer_kinds.FULL in given else next(iter(given)))
    found = _object(given, kind)
    if not found:
        raise ValueError(f"rope_parameters of {kind} are missing")
    return found


def _by_rule(own: Mapping[str, Any], rule: Bases, kind: str) -> dict[str, Any]:
    """The RoPE parameters of a kind of layer, in a class that has a key for each kind (`BY_KIND`)."""
    sliding = kind == layer_kinds.SLIDING
    every = _object(own, "rope_parameters")
    found: dict[str, Any] = {"rope_type": "default"}
    if every:
        found = dict(_object(every, layer_kinds.SLIDING if sliding else layer_kinds.FULL)) or found
    if rule.scaled or not sliding:
        found |= _object(own, "rope_scaling")
    base = own.get(rule.full) or rule.full_default
    if sliding:  # a base that is null is that of full attention
        base = own.get(rule.sliding, rule.sliding_default) or base
    return {"rope_theta": base} | found


def _base(own: Mapping[str, Any], model_type: str) -> Any:
    """The base by a key outside the RoPE parameters (for DBRX in attn_config), or by the class."""
    nested = own.get("attn_config")
    for part in (own, nested if isinstance(nested, Mapping) else {}):
        if part.get(key := BASE_KEYS.get(model_type, "rope_theta")):
            return part[key]
    return next((base for base, types in BASES.items() if model_type in types.split()), 10000.0)


def _share(own: Mapping[str, Any], model_type: str) -> Any:
    """The share of a head that is rotated, by a key outside the RoPE parameters or by the class."""
    default = next((part for part, types in SHARES.items() if model_type in types.split()), None)
    return own.get(SHARE_KEYS.get(model_type, _SHARE), default)
