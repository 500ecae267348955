"""Registers public types with `jax.export`, for exported functions that take or return them.

A program that `jax.export` serialises holds the structure of its arguments and results. It is a
file format: names of types and fields stay as they are. A type that changes in another way than by
a further field, whose default is None, gets another name and keeps the registration of this one.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn, TypeAlias

import jax
import numpy as np
from jax import export

from jaxmha.arrays import to_dtype
from jaxmha.implementations.program import Program
from jaxmha.kv_cache import KVCache
from jaxmha.latent import LatentCache, LatentParams
from jaxmha.mask import FIELDS, Mask, traced_fields
from jaxmha.paged_cache import PagedKVCache
from jaxmha.params import MHAParams, Projection
from jaxmha.semantics import Semantics

# NamedTuples of arrays; exported programs store the names of their fields: do not rename them.
RECORDS = (Projection, MHAParams, LatentParams, KVCache, PagedKVCache, LatentCache)

Static: TypeAlias = Mapping[str, Any]


def register() -> None:
    """Registers the types; types that the process has registered before are skipped."""
    for record in RECORDS:
        _register(record, partial(_write_record, record), partial(_build_record, record))
    _register(Mask, _write_mask, _build_mask)
    _register(Semantics, _write_semantics, _build_semantics)
    _register(Program, _no_program, _no_program)


def _register(
    kind: type[Any],
    serialize: Callable[[Any], bytes],
    build: Callable[[Static, Sequence[Any]], Any],
) -> None:
    with suppress(ValueError):  # the name is known: jaxmha was imported twice, as by a reload
        export.register_pytree_node_serialization(
            kind,
            serialized_name=f"jaxmha.{kind.__name__}",
            serialize_auxdata=serialize,
            deserialize_auxdata=json.loads,
            from_children=lambda aux_data, children: build(aux_data, children),
        )


def _known(kind: type[Any], given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Returns the `given` fields that are in `known`; ValueError if any other is not None."""
    unknown = [name for name, value in given.items() if name not in known and value is not None]
    if unknown:
        raise ValueError(
            f"the exported function has a jaxmha.{kind.__name__} with {', '.join(unknown)}, and "
            "this version of jaxmha has no such field: use the version that exported it, or a later "
            "one"
        )
    return {name: value for name, value in given.items() if name in known}


def _write_record(kind: type[Any], _: None) -> bytes:
    return json.dumps({"fields": kind._fields}).encode()


def _build_record(kind: type[Any], static: Static, children: Sequence[Any]) -> Any:
    given = dict(zip(static["fields"], children, strict=True))
    return kind(**_known(kind, given, kind._fields))


def _write_mask(static: tuple[int | None, tuple[int | None, int | None] | None]) -> bytes:
    offset, window = static
    return json.dumps(
        {"fields": traced_fields(static), "causal_offset": offset, "window_size": window}
    ).encode()


def _build_mask(static: Static, children: Sequence[Any]) -> Mask:
    given = dict(zip(static["fields"], children, strict=True))
    values = _known(Mask, given, FIELDS)
    window = static["window_size"]
    own = static["causal_offset"], window if window is None else tuple(window)
    return Mask.tree_unflatten(own, tuple(values.get(name) for name in traced_fields(own)))


def _write_semantics(semantics: Semantics) -> bytes:
    own = {field.name: getattr(semantics, field.name) for field in fields(Semantics)}
    dtype = semantics.softmax_dtype
    own["softmax_dtype"] = None if dtype is None else to_dtype(dtype).name
    own["precision"] = _write_precision(semantics.precision)
    return json.dumps(own).encode()


def _build_semantics(static: Static, _: Sequence[Any]) -> Semantics:
    own = _known(Semantics, static, [field.name for field in fields(Semantics)])
    return Semantics(**{**own, "precision": _build_precision(own["precision"])})


def _write_precision(precision: Any) -> object:
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        return {"preset": precision.name}
    if isinstance(precision, jax.lax.DotAlgorithm):
        names = [np.dtype(dtype).name for dtype in precision[:3]]
        return {"algorithm": [*names, *precision[3:]]}
    return [_write_precision(x) for x in precision] if isinstance(precision, tuple) else precision


def _build_precision(stored: Any) -> Any:
    if isinstance(stored, dict) and "preset" in stored:
        return jax.lax.DotAlgorithmPreset[stored["preset"]]
    if isinstance(stored, dict):
        lhs, rhs, total, *counts = stored["algorithm"]
        return jax.lax.DotAlgorithm(np.dtype(lhs), np.dtype(rhs), np.dtype(total), *counts)
    return tuple(map(_build_precision, stored)) if isinstance(stored, list) else stored


def _no_program(*_: object) -> NoReturn:
    raise TypeError(
        "a BlockMask cannot be an argument or a result of an exported function: it has a traced "
        "mask function, which has no serialised form. Let the exported function close over it, or "
        "make it inside with jaxmha.mods.block_mask"
    )
