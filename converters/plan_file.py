"""Plans as TOML files, to be read and edited by people.

    [plan]                            # what the file is for
    version = 1
    source = "model.safetensors"
    digest = "sha256:..."             # of the source's contents; another source is refused
    to = "flax"                       # layout of attention; neighbours as its framework has them
    others = "pass"                   # "refuse": stop where something is not understood
    dtype = "bfloat16"                # cast every floating tensor; leave it out to cast none

    [[module]]                        # one per layer; every tensor of the source is in one of them
    kind = "attention"                # or linear, conv1d, norm, rmsnorm, embedding, convolution,
                                      # or other: one tensor, carried over under the name in `to`
    layout = "bert"                   # of attention; torch, keras, flax ... of its neighbours
    from = "encoder.layer.0.attention"
    to = "encoder/layer/0/attention"
    as = "attention"                  # the kind there, such as linear for a conv1d
    num_heads = 12                    # of attention
    name = "attention_0"              # of the layer, in .weights.h5 files
    tensors = ["encoder.layer.0.attention.self.query.weight", ...]
"""

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmha.converters.checkpoint.errors import printable
from jaxmha.converters.moves import Made
from jaxmha.converters.plan import OTHERS, Move, Plan

VERSION = 1
_KEYS = {
    "kind": str,
    "layout": str,
    "from": str,
    "to": str,
    "as": str,
    "num_heads": int,
    "name": str,
    "tensors": list,
}
_FIELDS = {"from": "source", "to": "target", "as": "becomes"}


def dumps(plan: Plan, made: Mapping[Move, Mapping[str, Made]] | None = None) -> str:
    """The TOML of a plan, with what is made of every tensor as comments.

    >>> text = dumps(Plan("flax", (Move("other", "", "a", "b", ("a",)),)))
    >>> loads(text) == Plan("flax", (Move("other", "", "a", "b", ("a",)),))
    True
    """
    return "\n".join(_lines(plan, made or {})) + "\n"


def _lines(plan: Plan, made: Mapping[Move, Mapping[str, Made]]) -> Iterator[str]:
    yield "# Edit, then run: jaxmha convert SOURCE DESTINATION --plan THIS_FILE"
    yield "[plan]"
    yield f"version = {VERSION}"
    for key in ("source", "digest", "to", "others", "dtype"):
        if value := getattr(plan, key):
            yield f"{key} = {_quoted(value)}"
    for note in plan.notes:
        yield f"# note: {printable(note)}"
    for move in plan.moves:
        yield ""
        yield "[[module]]"
        if move.why:
            yield f"# {printable(f'{move.confidence}: {move.why}' if move.confidence else move.why)}"
        for key, kind in _KEYS.items():
            value = getattr(move, _FIELDS.get(key, key))
            if kind is list:
                listed = ",\n  ".join(_quoted(name) for name in value)
                yield f"{key} = [{listed}]" if len(value) == 1 else f"{key} = [\n  {listed},\n]"
            elif value not in ("", None) or key in ("from", "to"):
                yield f"{key} = {value if kind is int else _quoted(value)}"
        for name, one in made.get(move, {}).items():
            arrow = f" ({one.arrow})" if one.arrow else ""
            yield f"# -> {printable(name)} {one.info.shape}{arrow}"


def loads(text: str) -> Plan:
    """The plan in a TOML text.

    Raises:
      ValueError: it is no TOML, or a key is missing, unknown, or of another type.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the plan is no TOML: {error}") from error
    head = content.get("plan")
    if not isinstance(head, dict) or content.keys() - {"plan", "module"}:
        raise ValueError("the plan must have one table [plan] and tables [[module]]")
    if head.get("version") != VERSION:
        raise ValueError(f"the plan has version {head.get('version')!r}, this program reads {VERSION}")
    known = {"version", "source", "digest", "to", "others", "dtype"}
    if extra := sorted(head.keys() - known):
        raise ValueError(f"unknown key {extra[0]!r} in [plan]: it has {', '.join(sorted(known))}")
    settings = {key: head[key] for key in known - {"version"} if key in head}
    for key, value in settings.items():
        if not isinstance(value, str):
            raise ValueError(f"[plan] {key} must be a string, got {value!r}")
    if "to" not in settings:
        raise ValueError("[plan] lacks `to`, the layout of attention")
    if settings.get("others", "pass") not in OTHERS:
        raise ValueError(f"[plan] others must be {' or '.join(OTHERS)}, got {settings['others']!r}")
    listed = content.get("module", [])
    if not isinstance(listed, list):
        raise ValueError("modules are written as [[module]]")
    return Plan(moves=tuple(_move(i, table) for i, table in enumerate(listed, 1)), **settings)


def _move(i: int, table: Any) -> Move:
    where = f"module {i}"
    if not isinstance(table, dict):
        raise ValueError(f"{where} is no table")
    if extra := sorted(table.keys() - _KEYS.keys()):
        raise ValueError(f"{where} has an unknown key {extra[0]!r}: it has {', '.join(_KEYS)}")
    for key in ("kind", "from", "to", "tensors"):
        if key not in table:
            raise ValueError(f"{where} lacks {key!r}")
    for key, value in table.items():
        if type(value) is not _KEYS[key]:
            raise ValueError(f"{where}: {key} must be a {_KEYS[key].__name__}, got {value!r}")
    if not all(isinstance(name, str) for name in table["tensors"]) or not table["tensors"]:
        raise ValueError(f"{where}: tensors must be a list of names")
    settings = {_FIELDS.get(key, key): value for key, value in table.items()}
    layout = settings.pop("layout", "")
    return Move(layout=layout, **settings | {"tensors": tuple(settings["tensors"])})


def read(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file. Raises ValueError as `loads` does, with the path."""
    try:
        return loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _quoted(text: str) -> str:
    """A TOML basic string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
