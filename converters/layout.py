"""Parameter layouts as data, and the engine that reads them in both directions.

An array of a framework is three facts: its key, its axes, and the canonical leaves in it. Import
is one einops arrow from these axes to the canonical ones, export the same arrow turned round.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from einops import rearrange

from jaxmha import MHAParams, Semantics
from jaxmha.axes import bind, parse
from jaxmha.converters.arrays import NDArray, to_numpy
from jaxmha.params import CANONICAL, check, from_leaves, leaves


class Entry(NamedTuple):
    """One array of a layout: `axes` in the letters of the dimension key.

    Several leaves are packed along the axis named `qkv` (or `kv`). Entries of one `group` are
    there together or not at all; without a group an entry is required.
    """

    key: str
    axes: str
    leaves: tuple[str, ...]
    group: str = ""


@dataclass(frozen=True)
class Layout:
    """The parameter layout of one framework's layer.

    Attributes:
      name: how users name it (`--to torch`).
      entries: every array of it.
      ties: sizes the layer does not choose freely: letter -> letter or product, with the reason.
      separator: joins a prefix and a key.
      semantics: what the layer does beside its weights.
      holds: further fields of `Semantics` that the layer has a setting for.
      beside: keys under the same prefix that are not attention.
      about: the framework's class and where the layout is documented.
    """

    name: str
    entries: tuple[Entry, ...]
    ties: Mapping[str, tuple[str, str]]
    separator: str = "."
    semantics: Semantics = Semantics()  # noqa: RUF009 (frozen)
    holds: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()
    about: str = ""

    def __post_init__(self) -> None:
        known = {leaf for entry in self.entries for leaf in entry.leaves}
        assert known <= CANONICAL.keys(), f"{self.name}: unknown leaves {known - CANONICAL.keys()}"

    @property
    def stores_num_heads(self) -> bool:
        """Whether the head count can be read from a shape."""
        return any(("N",) in parse(entry.axes) for entry in self.entries)

    def path(self, prefix: str, key: str) -> str:
        """A key under a prefix."""
        return f"{prefix}{self.separator}{key}" if prefix else key

    def tied(self, axes: str) -> str:
        """Axes with letters that the layout ties to another letter replaced by that one."""
        single = {a: b for a, (b, _) in self.ties.items() if " " not in b}
        return re.sub(r"\w+", lambda word: single.get(word[0], word[0]), axes)


def import_params(
    layouts: Sequence[Layout],
    state: Mapping[str, Any],
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    prefix: str = "",
) -> tuple[MHAParams, Semantics]:
    """Reads the keys under `prefix` by the layout that fits (or the one named).

    Raises:
      ValueError: an unknown layout; a key that is unknown or missing; a shape that does not fit,
        with the axes expected; a head count that is needed, or contradicts a shape.
    """
    chosen = choose(layouts, [_strip(k, prefix, layouts) for k in state], layout, prefix)
    arrays = {
        key: state[name]
        for name in state
        if (key := _strip(name, prefix, layouts)) is not None and key not in chosen.beside
    }
    _check_keys(chosen, arrays, prefix)
    sizes = _bind_all(chosen, arrays, prefix, num_heads)
    found: dict[str, Any] = {}
    for entry in chosen.entries:
        if entry.key in arrays:
            found |= _unpack(chosen, entry, to_numpy(arrays[entry.key]), sizes)
    semantics = chosen.semantics
    if "query_norm" not in found:
        semantics = replace(semantics, qk_norm=None)
    return from_leaves(found), semantics


def export_params(
    layout: Layout, params: MHAParams, semantics: Semantics = Semantics(), *, prefix: str = ""
) -> dict[str, NDArray]:
    """Writes every leaf under the layout's keys.

    Raises:
      ValueError: the layout cannot hold the parameters or the behaviour; says which and why.
    """
    arrays = {name: to_numpy(array) for name, array in leaves(params).items()}
    leading = arrays["query.kernel"].ndim - 3
    sizes = check(params, leading)
    refuse_sizes(layout, sizes)
    refuse_leaves(layout, arrays)
    refuse_semantics(layout, params, semantics, sizes)
    return {
        layout.path(prefix, entry.key): _pack(layout, entry, arrays)
        for entry in layout.entries
        if entry.leaves[0] in arrays
    }


def choose(
    layouts: Sequence[Layout], keys: Sequence[str | None], name: str | None, prefix: str
) -> Layout:
    """The layout named, or the only one whose required keys are all there."""
    names = [layout.name for layout in layouts]
    if name is not None:
        if name not in names:
            raise ValueError(f"unknown layout {name!r}: known are {', '.join(names)}")
        return layouts[names.index(name)]
    missing = {
        layout.name: [e.key for e in layout.entries if not e.group and e.key not in keys]
        for layout in layouts
    }
    for layout in layouts:
        if not missing[layout.name]:
            return layout
    where = f" under prefix {prefix!r}" if prefix else ""
    lacks = "; ".join(f"{n} lacks {', '.join(keys)}" for n, keys in missing.items())
    raise ValueError(f"no known layout has all its keys{where}: {lacks}")


def refuse_sizes(layout: Layout, sizes: Mapping[str, int]) -> None:
    """Raises ValueError for sizes that the layout ties together, and says why it does."""
    for letter, (tied, reason) in layout.ties.items():
        if letter not in sizes or not all(a in sizes for a in tied.split()):
            continue
        product = int(np.prod([sizes[a] for a in tied.split()]))
        if sizes[letter] != product:
            shown = " * ".join(f"{a}={sizes[a]}" for a in tied.split())
            raise ValueError(
                f"layout {layout.name} cannot hold {letter}={sizes[letter]} with {shown}: {reason}"
            )


def refuse_leaves(layout: Layout, present: Mapping[str, Any]) -> None:
    """Raises ValueError for leaves that the layout has no place for, lacks, or needs together."""
    known = {leaf for entry in layout.entries for leaf in entry.leaves}
    if extra := [leaf for leaf in present if leaf not in known]:
        raise ValueError(
            f"layout {layout.name} cannot hold {', '.join(extra)}: it has no such parameter"
        )
    for group in dict.fromkeys(entry.group for entry in layout.entries):
        wanted = [leaf for e in layout.entries if e.group == group for leaf in e.leaves]
        missing = [leaf for leaf in wanted if leaf not in present]
        if missing and not group:
            raise ValueError(f"layout {layout.name} needs {', '.join(missing)}, which is not there")
        if missing and len(missing) < len(wanted):
            there = [leaf for leaf in wanted if leaf in present]
            raise ValueError(
                f"layout {layout.name} holds {', '.join(wanted)} together or not at all; "
                f"there: {', '.join(there)}; missing: {', '.join(missing)} (a bias of zeros "
                "changes nothing)"
            )


# Fields that say how to evaluate, not which function it is.
_EVALUATION = {"fully_masked", "softmax_dtype", "precision"}


def refuse_semantics(
    layout: Layout, params: MHAParams, semantics: Semantics, sizes: Mapping[str, int]
) -> None:
    """Raises ValueError for behaviour that the layer has no setting for."""
    ignored = {*_EVALUATION, *layout.holds}
    if semantics.dropout_rate == 0:
        ignored |= {"dropout_broadcast"}
    if params.query_norm is None and semantics.qk_norm is None:
        ignored |= {"qk_norm", "qk_norm_epsilon"}
    default = sizes["H"] ** -0.5
    for field in fields(Semantics):
        ours, theirs = getattr(semantics, field.name), getattr(layout.semantics, field.name)
        if field.name == "scale":
            ours, theirs = (default if s is None else s for s in (ours, theirs))
        if field.name not in ignored and ours != theirs:
            raise ValueError(
                f"layout {layout.name} cannot hold semantics.{field.name}={ours!r}: its layer "
                f"always has {theirs!r}"
            )


def _strip(name: str, prefix: str, layouts: Sequence[Layout]) -> str | None:
    if not prefix:
        return name
    start = prefix + layouts[0].separator
    return name.removeprefix(start) if name.startswith(start) else None


def _check_keys(layout: Layout, arrays: Mapping[str, Any], prefix: str) -> None:
    keys = [entry.key for entry in layout.entries]
    where = f" under prefix {prefix!r}" if prefix else ""
    if unknown := [key for key in arrays if key not in keys]:
        raise ValueError(
            f"unknown key {', '.join(map(repr, unknown))}{where}: layout {layout.name} has "
            f"{', '.join(keys)}"
        )
    for group in dict.fromkeys(entry.group for entry in layout.entries):
        wanted = [entry.key for entry in layout.entries if entry.group == group]
        missing = [key for key in wanted if key not in arrays]
        if missing and (not group or len(missing) < len(wanted)):
            together = f", which comes with {', '.join(wanted)}" if group else ""
            raise ValueError(
                f"missing key {', '.join(map(repr, missing))}{where}: layout {layout.name} needs "
                f"it{together}"
            )


def _bind_all(
    layout: Layout, arrays: Mapping[str, Any], prefix: str, num_heads: int | None
) -> dict[str, int]:
    if num_heads is None and not layout.stores_num_heads:
        raise ValueError(
            f"layout {layout.name} does not store the head count: pass num_heads= (it is in the "
            "model's configuration, and cannot be read from these shapes)"
        )
    sizes = {} if num_heads is None else {"N": num_heads}
    lead: tuple[str, tuple[int, ...]] | None = None
    for entry in layout.entries:
        if entry.key not in arrays:
            continue
        name, shape = layout.path(prefix, entry.key), tuple(arrays[entry.key].shape)
        split = max(len(shape) - len(parse(entry.axes)), 0)
        lead = lead or (name, shape[:split])
        if shape[:split] != lead[1]:
            raise ValueError(
                f"{name}: expected leading axes {lead[1]} as in {lead[0]}, then ({entry.axes}), "
                f"got shape {shape}"
            )
        packed = {"qkv": len(entry.leaves), "kv": len(entry.leaves)}
        bound = sizes | packed
        bind(name, shape[split:], entry.axes, bound)
        sizes |= {k: v for k, v in bound.items() if k not in packed}
    refuse_sizes(layout, sizes)
    return sizes


def _unpack(
    layout: Layout, entry: Entry, array: NDArray, sizes: Mapping[str, int]
) -> dict[str, NDArray]:
    axes, target = layout.tied(entry.axes), layout.tied(CANONICAL[entry.leaves[0]])
    pack = _pack_axis(entry)
    known = {**sizes, pack: len(entry.leaves)}
    # What einops cannot infer: letters that share an array axis with others.
    shared = {a: known[a] for group in parse(axes) if len(group) > 1 for a in group}
    parts = rearrange(array, f"... {axes} -> {pack} ... {target}", **shared)
    return {leaf: to_numpy(part) for leaf, part in zip(entry.leaves, parts, strict=True)}


def _pack(layout: Layout, entry: Entry, arrays: Mapping[str, NDArray]) -> NDArray:
    parts = [arrays[leaf] for leaf in entry.leaves]
    if len({part.dtype for part in parts}) > 1:
        shown = ", ".join(f"{k} {p.dtype}" for k, p in zip(entry.leaves, parts, strict=True))
        raise ValueError(f"{entry.key} packs arrays of one dtype, got {shown}: cast them first")
    axes, source = layout.tied(entry.axes), layout.tied(CANONICAL[entry.leaves[0]])
    stacked = np.stack(parts)
    return to_numpy(rearrange(stacked, f"{_pack_axis(entry)} ... {source} -> ... {axes}"))


def _pack_axis(entry: Entry) -> str:
    """The axis that leaves are packed along; `1` where the array is a single leaf."""
    return next((a for group in parse(entry.axes) for a in group if a in ("qkv", "kv")), "1")


@runtime_checkable
class Import(Protocol):
    """The type of every module's `import_params`."""

    def __call__(
        self,
        state: Mapping[str, Any],
        *,
        layout: str | None = None,
        num_heads: int | None = None,
        prefix: str = "",
    ) -> tuple[MHAParams, Semantics]: ...


@runtime_checkable
class Export(Protocol):
    """The type of every module's `export_params`."""

    def __call__(
        self,
        params: MHAParams,
        semantics: Semantics = Semantics(),
        *,
        layout: str | None = None,
        prefix: str = "",
    ) -> dict[str, NDArray]: ...


def verbs(layouts: Sequence[Layout]) -> tuple[Import, Export]:
    """`import_params` and `export_params` of the module that has these layouts.

    Without a name, import takes the first layout whose keys are all there, and export the first
    that can hold the parameters.
    """
    names = ", ".join(layout.name for layout in layouts)

    def importer(
        state: Mapping[str, Any],
        *,
        layout: str | None = None,
        num_heads: int | None = None,
        prefix: str = "",
    ) -> tuple[MHAParams, Semantics]:
        return import_params(layouts, state, layout=layout, num_heads=num_heads, prefix=prefix)

    def exporter(
        params: MHAParams,
        semantics: Semantics = Semantics(),
        *,
        layout: str | None = None,
        prefix: str = "",
    ) -> dict[str, NDArray]:
        refusals = []
        for candidate in layouts if layout is None else [choose(layouts, [], layout, prefix)]:
            try:
                return export_params(candidate, params, semantics, prefix=prefix)
            except ValueError as refusal:
                refusals.append(refusal)
        raise refusals[0]

    importer.__doc__ = f"""Parameters from a flat dict of arrays by one of the layouts {names}.

    Args:
      state: arrays or tensors by key, a prefix and `{layouts[0].separator}` before each.
      layout: its name; default the first whose required keys are all there.
      num_heads: needed where no shape holds the head count, checked where one does.
      prefix: takes only the keys below it.

    Raises:
      ValueError: a key, shape or head count does not fit; names the key and the axes.
    """
    exporter.__doc__ = f"""A flat dict of NumPy arrays in one of the layouts {names}.

    Args:
      params, semantics: what to write.
      layout: its name; default the first that can hold the parameters.
      prefix: goes before every key.

    Raises:
      ValueError: the layout cannot hold the parameters or the behaviour, with the reason.
    """
    importer.__name__, exporter.__name__ = "import_params", "export_params"
    return importer, exporter
