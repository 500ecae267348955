"""Reads a source or a target as named arrays with shapes and, if known, their axis orders."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from jaxmha import checkpoint
from jaxmha.checkpoint import hub, optimizer_state
from jaxmha.converters.discovery import hf_config, live_model
from jaxmha.converters.discovery.user_names import dotted
from jaxmha.converters.layout.arrays import NDArray, framework_of, to_numpy
from jaxmha.converters.matching import keras_files, keras_graph, repeats
from jaxmha.converters.matching.classes import alternates, form_of, name_of
from jaxmha.converters.matching.leaves import node, tree_leaves
from jaxmha.converters.matching.stated import Stated, of_file, of_layers, of_torch, ties_heads

_STATES = ("file", "tree", "linen", "nnx")  # kinds of trees that may have optimizer state
_NO_WEIGHTS = ("cache", "intermediates", "losses", "metrics")  # linen collections without weights


DependsOn = Mapping[tuple[str, ...], frozenset[tuple[str, ...]] | None]


class Array(NamedTuple):
    """One array: `name` in the framework, its parts as `path`, and its axis order `form`.

    `form` is "" if unknown, "raw" if torch's class is unknown, so that keys do not tell it either.
    `owner`: the class of the live layer that holds it; "" if it is unknown. `alternates`: True if its
    layer states that the rows of packed parts alternate, False if the parts follow one another.
    `torch`: True if torch is known to have made it: it is in a model, a state dict or a file of torch.
    """

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    form: str = ""
    owner: str = ""
    alternates: bool | None = None
    torch: bool = False


@dataclass(frozen=True)
class Tree:
    """The arrays of a source or target.

    Attributes:
      kind: "torch", "nnx", "linen", "equinox", "keras", "keras state", "file" or "tree".
      load: reads one array by name; it is never called for a target.
      aliases: second name of a shared array -> its first. `arrays` has both only for a file.
      close: closes the file, if any.
      origin: for a model from a hub, its address with the commit.
      notes: remarks on reading, such as that tensors are dequantised.
      depends_on: path of each layer with an automatic name -> paths of the layers whose output it
        needs; None: the graph is unknown, so its number may not tell its position.
      saved: for a Keras model or file: name of an array in the file -> name in the live model.
      ties: True if a configuration ties heads to embeddings, False if it does not; None: not known.
      order: the names in the order of the layers in the model, or of a state dict, which perhaps
        has the order of its model; () if it is not known.
      channels_first: names of the arrays of Keras' convolutions whose output has channels first
        where it is flattened.
      stated: returns the facts, such as a head count, that the layer of each array states.
    """

    kind: str
    arrays: Mapping[str, Array]
    load: Callable[[str], NDArray]
    aliases: Mapping[str, str] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None
    origin: str = ""
    notes: tuple[str, ...] = ()
    depends_on: DependsOn = field(default_factory=dict)
    saved: Mapping[str, str] = field(default_factory=dict)
    ties: bool | None = None
    order: tuple[str, ...] = ()
    channels_first: frozenset[str] = frozenset()
    stated: Callable[[], Mapping[str, Stated]] = dict


def read(model: Any, argument: str = "source") -> Tree:
    """Lists the arrays of a file, a folder of `save_pretrained`, a state dict, tree or model.

    The state of an optimizer next to them is left out.
    `argument`: name of the argument `model` in error messages.

    Raises:
      TypeError: `model` is a class, or contains no array.
      CheckpointError: the file cannot be read.
    """
    return _without_optimizer(_read(model, argument))


def _read(model: Any, argument: str) -> Tree:
    if isinstance(model, type):
        raise TypeError(
            f"{argument} must be a model or a tree of arrays, got the class {model.__name__}: "
            "pass an instance of it"
        )
    if hub.is_address(model):
        found = hub.fetch(model)
        return replace(_file(found.folder), origin=found.address)
    if isinstance(model, str | Path):
        return _file(Path(model))
    framework = framework_of(model)
    if framework == "torch":
        return _torch(model)
    if framework == "keras":
        return _keras(model)
    if isinstance(model, tuple) and len(model) == 2 and framework_of(model[0]) == "flax":
        return _tree(model[1], "linen", argument, model[0])
    if is_nnx(model):
        return _nnx(model)
    if isinstance(model, Mapping) and "params" in model:
        return _tree(model, "linen", argument)
    if isinstance(model, Mapping) and keras_files.has_names(model):
        return _keras_state(model)
    if isinstance(model, Mapping) and any(str(name).endswith(".weight") for name in model):
        aliases = _aliases(model, model) if argument == "source" else {}
        return replace(_tree(model, "file", argument), order=_order(model), aliases=aliases)
    return _tree(model, framework if framework == "equinox" else "tree", argument)


def is_nnx(model: object) -> bool:
    """True for an nnx module and for its State."""
    mapping = isinstance(model, Mapping)  # nnx.Dict and State are mappings too
    of_nnx = any(base.__module__.startswith("flax.nnx") for base in type(model).__mro__)
    return of_nnx if mapping else framework_of(model) == "flax"


def _file(path: Path) -> Tree:
    stack = ExitStack()
    file = stack.enter_context(checkpoint.open(path, dequantise=True, unbox=True))
    shapes = {name: info.shape for name, info in file.info.items()}
    by_keras = file.format in ("keras_h5", "keras")
    keras = keras_files.paths(shapes, file.names) if by_keras else {}
    arrays = {}
    tied = {name: file.info[first] for name, first in file.tied.items()}
    for name, info in (*file.info.items(), *tied.items()):
        parts, form, _ = keras.get(name) or (split(name), "", name)
        arrays[name] = Array(name, parts, tuple(info.shape), info.dtype.name, form)
    automatic = _counted(arrays) | keras_files.numbered_by_keras(keras)
    by_torch = file.format == "torch" or file.metadata.get("format") == "pt"
    arrays = {name: one._replace(torch=by_torch) for name, one in arrays.items()}
    tree = Tree(
        "file",
        arrays,
        lambda name: file[file.tied.get(name, name)],
        file.tied,
        close=stack.close,
        notes=file.notes,
        depends_on=dict.fromkeys(automatic),
        saved={name: one.name for name, one in keras.items()},
        ties=ties_heads(hf_config.readable(file.path)),
        order=_order(file.info) if file.format == "torch" else (),
        stated=lambda: of_file(file),
    )
    return _without_optimizer(tree, file.others)


def _order(names: Iterable[Any]) -> tuple[str, ...]:
    """The order of a state dict; () if it is sorted by names, which says nothing of its model."""
    order = [str(name) for name in names]
    return () if order == sorted(order) else tuple(order)


def _without_optimizer(tree: Tree, others: Sequence[str] = ()) -> Tree:
    """Returns a tree without the state of an optimizer, which a note mentions."""
    left = set(optimizer_state.find(tree.arrays, others))
    found = optimizer_state.described(len(left), others)
    if tree.kind not in _STATES or not found or len(left) == len(tree.arrays):
        return tree
    weights = {name: array for name, array in tree.arrays.items() if name not in left}
    return replace(tree, arrays=weights, notes=(*tree.notes, f"{found} are left out"))


def split(name: str) -> tuple[str, ...]:
    """Splits a name at "." and "/"; Haiku's `~` is dropped.

    >>> split("a.0.weight"), split("net/~/linear/w")
    (('a', '0', 'weight'), ('net', 'linear', 'w'))
    """
    return tuple(part for part in re.split(r"[./]", name) if part and part != "~")


def _torch(module: Any) -> Tree:
    live = live_model.torch(module)
    state = {n: x for n, x in live.state.items() if hasattr(x, "data_ptr")}
    left = [name for name in live.state if name not in state]  # from get_extra_state, or quantised
    notes = (f"left out: entries that are not tensors: {', '.join(left)}",) * bool(left)
    kept = state
    if not all(tensor.data_ptr() for tensor in state.values()):
        kept = module.state_dict(keep_vars=True)  # on the meta device, only identity shows sharing
    arrays, aliases = dict[str, Array](), _aliases(state, kept)
    for name, tensor in ((n, x) for n, x in state.items() if n not in aliases):
        layer = live.layers.get(name.rpartition(".")[0])
        form = form_of(layer, "torch") or "raw"
        shape, dtype = tuple(tensor.shape), _dtype(tensor)
        of_class = form, name_of(layer), alternates(layer), True
        arrays[name] = Array(name, split(name), shape, dtype, *of_class)
    return Tree(
        "torch",
        arrays,
        lambda name: to_numpy(state[name], name),
        aliases,
        notes=notes,
        ties=ties_heads(_configuration(module)),
        order=tuple(arrays),
        stated=partial(of_torch, arrays, live.layers),
    )


def _aliases(state: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, str]:
    """Maps the second name of each tensor of torch to its first; `kept`: variables, not copies."""
    found, seen = dict[str, str](), dict[tuple[Any, ...], str]()
    for name, x in state.items():
        if hasattr(x, "data_ptr") and x.numel():
            where = (x.data_ptr() or id(kept[name]), tuple(x.shape), x.stride())
            if (first := seen.setdefault(where, name)) != name:
                found[name] = first
    return found


def _configuration(module: Any) -> Mapping[str, Any]:
    """The configuration of a model of transformers; empty for any other module."""
    config: Any = getattr(module, "config", None) if hasattr(module, "save_pretrained") else None
    return config.to_dict() if hasattr(config, "to_dict") else {}


def _nnx(module: Any) -> Tree:
    from flax import nnx

    if isinstance(module, nnx.State):
        state, layers = module, {}
    else:
        state = nnx.state(module)
        layers = {tuple(map(str, path)): one for path, one in nnx.iter_modules(module)}
    *_, kept = nnx.split_state(state, nnx.RngState, nnx.Cache, ...)
    arrays, values = {}, {}
    for path, leaf in nnx.to_flat_state(kept):
        parts = tuple(map(str, path))
        value = leaf.get_value() if hasattr(leaf, "get_value") else leaf
        name = "/".join(parts)
        layer, shape = layers.get(parts[:-1]), tuple(value.shape)
        of_class = form_of(layer, "flax"), name_of(layer)
        arrays[name] = Array(name, parts, shape, str(value.dtype), *of_class)
        values[name] = value
    stated = partial(of_layers, arrays, layers.get)
    return Tree("nnx", arrays, lambda name: to_numpy(values[name], name), stated=stated)


def _keras(model: Any) -> Tree:
    arrays, values, live = {}, {}, live_model.keras(model)
    first, firsts = keras_graph.channels_first(live.layers), set[str]()
    for name, layer, variable in keras_variables(live):
        form = "no" if "Transpose" in type(layer).__name__ else ""
        form = "no" if "Depthwise" in type(layer).__name__ else form
        firsts |= {name} if id(layer) in first else set()
        of_class = form, name_of(layer) if form else ""
        shape, dtype = tuple(variable.shape), str(variable.dtype)
        arrays[name] = Array(name, split(name), shape, dtype, *of_class)
        values[name] = variable
    depends_on = {
        split(_shown(path, live)): needs
        if needs is None
        else frozenset(split(_shown(n, live)) for n in needs)
        for path, needs in keras_graph.dependencies(live).items()
        if split(_shown(path, live))[-1:] == split(path)[-1:]  # else the user has named it
    }
    names = {id(variable): name for name, variable in values.items()}
    saved = {key: names.get(id(x), "") for key, x in live.state.items()}
    return Tree(
        "keras",
        arrays,
        lambda name: to_numpy(values[name], name),
        depends_on=depends_on,
        saved=saved,
        order=tuple(arrays) if keras_graph.in_order(live.layers) else (),
        channels_first=frozenset(firsts),
        stated=partial(
            of_layers, arrays, {split(_shown(path, live)): x for path, x in live.layers.items()}.get
        ),
    )


def _keras_state(state: Mapping[str, Any]) -> Tree:
    """The arrays of a flat dict with the names of a Keras file, which gives no names of layers."""
    state = {n: x for n, x in state.items() if hasattr(x, "shape") and hasattr(x, "dtype")}
    found = keras_files.paths({name: tuple(x.shape) for name, x in state.items()}, {})
    arrays = {}
    for name, x in state.items():
        path, form, _ = found.get(name) or (split(name), "", name)
        arrays[name] = Array(name, path, tuple(x.shape), _dtype(x), form)
    automatic = _counted(arrays) | keras_files.numbered_by_keras(found)
    return Tree(
        "keras state",
        arrays,
        lambda name: to_numpy(state[name], name),
        depends_on=dict.fromkeys(automatic),
    )


def _counted(arrays: Mapping[str, Array]) -> set[tuple[str, ...]]:
    return repeats.counted_by_keras([array.path for array in arrays.values()])


def keras_variables(live: live_model.LiveModel) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, layer and variable of every weight of a Keras model, except random seeds.

    A name consists of attribute names, or of layer names in a functional model. If weights of a
    layer share a name, all but the first get a number.
    """
    seen: set[int] = set()
    names: set[str] = set()
    for path, layer in live.layers.items():
        own = [
            *getattr(layer, "_trainable_variables", ()),
            *getattr(layer, "_non_trainable_variables", ()),
        ]
        for variable in own:
            if id(variable) not in seen and variable.name != "seed_generator_state":
                seen.add(id(variable))
                name = f"{_shown(path, live)}/{variable.name}".removeprefix("/")
                numbered = (f"{name}_{n}" if n else name for n in count())
                names.add(free := next(one for one in numbered if one not in names))
                yield free, layer, variable


def _shown(path: str, live: live_model.LiveModel) -> str:
    """Returns the path of a Keras layer; in a functional model, with the name that the user gave it."""
    if path.split("/")[0] != "layers":
        return path
    return dotted(path, "/", live.names).replace(".", "/")


def _tree(tree: Any, kind: str, argument: str, module: Any = None) -> Tree:
    flat = tree_leaves(tree)
    if not flat:
        raise TypeError(
            f"{argument} must be a model or a tree of arrays, got {type(tree).__name__}, in which "
            "there is no array: are the arguments swapped?"
        )
    arrays, values = {}, {}
    live = ("equinox", "tree")  # a dict or a tuple may hold layers of equinox
    for keys, leaf in flat:
        parts = tuple(part for key in keys for part in split(key))
        layer = node(tree, keys[:-1]) if kind in live else None
        name = "/".join(keys)
        if kind == "linen" and parts[0] in _NO_WEIGHTS:
            continue
        if kind == "linen" and len(parts) > 1:  # drops the linen collection
            parts = parts[1:]
        shape, of_class = tuple(leaf.shape), (form_of(layer, "equinox"), name_of(layer))
        by_torch = framework_of(leaf) == "torch"
        arrays[name] = Array(name, parts, shape, _dtype(leaf), *of_class, torch=by_torch)
        values[name] = leaf
    automatic = _counted(arrays) if kind in ("tree", "file") else set()

    def layer_at(path: tuple[str, ...]) -> Any:
        # Inner modules of linen exist only while the model runs: only the outermost is known.
        return node(tree, path) if kind in live else None if path else module

    return Tree(
        kind,
        arrays,
        lambda name: to_numpy(values[name], name),
        depends_on=dict.fromkeys(automatic),
        stated=partial(of_layers, arrays, layer_at),
    )


def _dtype(array: Any) -> str:
    return str(getattr(array.dtype, "name", array.dtype)).removeprefix("torch.")
