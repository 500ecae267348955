"""Plans as TOML files that people can read and edit.

[plan]                            # settings of the whole plan
version = 1
source = "model.safetensors"
digest = "sha256:..."             # of the source's contents; another source raises
to = "flax"                       # layout of attention; other layers follow its framework
others = "pass"                   # "refuse": raise for a tensor that is not understood
fold_scale = true                 # multiply the queries if the layout has another logit scale
fill_bias = "zeros"               # add biases of zeros that the layout requires
dtype = "bfloat16"                # cast every floating tensor; without this line none
notes = ["..."]                   # facts that no tensor holds; printed when the plan is run

[[module]]                        # one per layer; every tensor of the source is in one module
kind = "attention"                # or latent, linear, conv1d, norm, rmsnorm, embedding, convolution,
                                  # or other: one tensor, copied under the name in `to`
layout = "bert"                   # of attention; for other layers torch, keras, flax ...
from = "encoder.layer.0.attention"
to = "encoder/layer/0/attention"
as = "attention"                  # the kind in the target, such as linear for a conv1d
num_heads = 12                    # of attention
name = "attention_0"              # of the layer, in .weights.h5 files
tensors = ["encoder.layer.0.attention.self.query.weight", ...]
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from jaxmha.checkpoint import ALGORITHMS, toml_text
from jaxmha.checkpoint.digests import is_digest
from jaxmha.checkpoint.errors import CheckpointError, printable, shown
from jaxmha.converters.discovery.layer_layouts import CONVENTIONS
from jaxmha.converters.layout.fill import FILLS
from jaxmha.converters.migrate.lazy_tensors import Made
from jaxmha.converters.migrate.plans import DTYPES, OTHERS, Plan, Step

VERSION = 1
KINDS = tuple(
    dict.fromkeys(
        ("attention", "latent", *(kind for one in CONVENTIONS for kind in one.kinds), "other"),
    )
)
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


def dumps(plan: Plan, made: Mapping[Step, Mapping[str, Made]] | None = None) -> str:
    """Returns a plan as TOML text; comments list the destination tensors of each step in `made`.

    >>> text = dumps(Plan("flax", (Step("other", "", "a", "b", ("a",)),)))
    >>> loads(text) == Plan("flax", (Step("other", "", "a", "b", ("a",)),))
    True
    """
    return "\n".join(_lines(plan, made or {})) + "\n"


def _lines(plan: Plan, made: Mapping[Step, Mapping[str, Made]]) -> Iterator[str]:
    yield "# Edit, then run: jaxmha convert SOURCE DESTINATION --plan THIS_FILE"
    yield "[plan]"
    yield f"version = {VERSION}"
    for key in ("source", "digest", "to", "others", "dtype"):
        if value := getattr(plan, key):
            yield f"{key} = {toml_text.quoted(value)}"
    if plan.fold_scale:
        yield "fold_scale = true"
    if plan.fill_bias:
        yield f"fill_bias = {toml_text.quoted(plan.fill_bias)}"
    if plan.notes:
        yield "notes = ["
        yield from (f"  {toml_text.quoted(note)}," for note in plan.notes)
        yield "]"
    for step in plan.steps:
        yield ""
        yield "[[module]]"
        if step.why:
            why = step.why.replace("name the kind in a plan", "set kind below to it")
            yield f"# {printable(f'{step.confidence}: {why}' if step.confidence else why)}"
        if step.num_heads is not None and step.heads_from:
            yield f"# num_heads: from {printable(step.heads_from)}"
        for key, kind in _KEYS.items():
            value = getattr(step, _FIELDS.get(key, key))
            if kind is list:
                listed = ",\n  ".join(toml_text.quoted(name) for name in value)
                yield f"{key} = [{listed}]" if len(value) == 1 else f"{key} = [\n  {listed},\n]"
            elif value not in ("", None) or key in ("from", "to"):
                yield f"{key} = {value if kind is int else toml_text.quoted(value)}"
        for name, one in made.get(step, {}).items():
            arrow = f" ({one.arrow})" if one.arrow else ""
            yield f"# -> {printable(name)} {one.info.shape}{arrow}"


def loads(text: str) -> Plan:
    """Parses a plan from TOML.

    Raises:
      ValueError: the text is not TOML, or a key is missing, unknown, or of another type.
    """
    content = toml_text.loads(text, ("[plan]", "[[module]]"))
    head = content.get("plan", {})
    _demand(
        isinstance(head, dict) and not content.keys() - {"plan", "module"},
        "the plan must have one table [plan] and tables [[module]]",
    )
    settings = _settings(head)
    listed = content.get("module", [])
    _demand(isinstance(listed, list), "modules are written as [[module]]")
    for i, table in enumerate(listed, 1):
        _demand(isinstance(table, dict), f"module {i} is no table")
    return Plan(steps=tuple(_step(i, table) for i, table in enumerate(listed, 1)), **settings)


def _settings(head: dict[str, Any]) -> dict[str, Any]:
    """Checks the table [plan], and returns its values as fields of a plan."""
    found = head.get("version")
    _demand(
        type(found) is int and found == VERSION,
        f"the plan has version {shown(found)}, and this program reads {VERSION}",
    )
    known = {"version", "source", "digest", "to", "others", "dtype", "notes"}
    known |= {"fold_scale", "fill_bias"}
    extra = sorted(head.keys() - known)
    _demand(not extra, f"unknown key {extra[:1]} in [plan]: it has {', '.join(sorted(known))}")
    settings = {
        key: head[key] for key in sorted(known - {"version", "notes", "fold_scale"}) if key in head
    }
    for key, value in settings.items():
        _demand(isinstance(value, str), f"[plan] {key} must be a string, got {shown(value)}")
    _demand("to" in settings, "[plan] lacks `to`, the layout of attention")
    others = settings.get("others", "pass")
    _demand(others in OTHERS, f"[plan] others must be {' or '.join(OTHERS)}, got {shown(others)}")
    dtype, digest, fills = (settings.get(key) for key in ("dtype", "digest", "fill_bias"))
    _demand(
        fills is None or fills in FILLS,
        f"[plan] fill_bias must be {' or '.join(FILLS)}, got {shown(fills)}",
    )
    _demand(
        dtype is None or dtype in DTYPES,
        f"[plan] dtype must be one of {', '.join(DTYPES)}, got {shown(dtype)}",
    )
    _demand(
        digest is None or is_digest(digest),
        f"[plan] digest must be one of {', '.join(ALGORITHMS)}, a colon and all its hexadecimal "
        f"digits, got {shown(digest)}: `jaxmha plan` writes that of the source",
    )
    notes = head.get("notes", [])
    _demand(
        isinstance(notes, list) and all(isinstance(note, str) for note in notes),
        f"[plan] notes must be a list of strings, got {shown(notes)}",
    )
    folds = head.get("fold_scale", False)
    _demand(isinstance(folds, bool), f"[plan] fold_scale must be true or false, got {folds!r}")
    return settings | {"notes": tuple(notes), "fold_scale": folds}


def _step(i: int, table: dict[str, Any]) -> Step:
    where = f"module {i}"
    extra = sorted(table.keys() - _KEYS.keys())
    _demand(not extra, f"{where} has an unknown key {extra[:1]}: it has {', '.join(_KEYS)}")
    for key in ("kind", "from", "to", "tensors"):
        _demand(key in table, f"{where} lacks {key!r}")
    for key, value in table.items():
        wanted = _KEYS[key]
        _demand(
            type(value) is wanted, f"{where}: {key} must be {wanted.__name__}, got {shown(value)}"
        )
    names = table["tensors"]
    _demand(
        bool(names) and all(isinstance(name, str) for name in names),
        f"{where}: tensors must be a list of names",
    )
    kind = table["kind"]
    _demand(
        kind in KINDS,
        f"{where} (from = {shown(table['from'])}): kind must be one of {', '.join(KINDS)}, "
        f"got {shown(kind)}",
    )
    settings = {_FIELDS.get(key, key): value for key, value in table.items()}
    return Step(**{"layout": ""} | settings | {"tensors": tuple(names)})


def _demand(fine: bool, message: str) -> None:
    if not fine:
        raise ValueError(message)


def read(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan from a file; raises as `loads` does, with the path, or CheckpointError."""
    try:
        return loads(toml_text.read(path))
    except CheckpointError:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
