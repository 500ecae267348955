"""Reads what no array of an attention layer shows: its head count and its settings.

Attributes of a live layer state them, or the metadata or config.json of a file.
"""

import pathlib
from collections.abc import Callable, Iterator, Mapping
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jaxmha import Semantics
from jaxmha.converters.discovery import (
    architectures,
    attended,
    behaviours,
    described,
    head_count,
    hf_config,
    layer_semantics,
    live_model,
    positions,
)
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.layer_semantics import IN_CALL, Behaviour
from jaxmha.converters.layout import transform

if TYPE_CHECKING:
    from jaxmha.checkpoint import Checkpoint
    from jaxmha.converters.discovery.head_count import Configured

Path = tuple[str, ...]
_EPSILONS = ("eps", "epsilon", "variance_epsilon")  # attributes of norms
# Parts of models (`architectures`) with which attention has other semantics than its layout says.
_FUNCTIONS = frozenset(["scale", "soft_cap", "qk_norm", "clip", "form"])


class Stated(NamedTuple):
    """A layer's name, and its head count and behaviour or, of a norm, its epsilon; None: unstated."""

    layer: str
    heads: int | None = None
    behaviour: Behaviour | None = None
    epsilon: float | None = None


class _Shape(NamedTuple):
    shape: tuple[int, ...]


class _InMemory(NamedTuple):
    """Stands in for the checkpoint of a live model, where only shapes and configuration are read."""

    path: pathlib.Path
    info: Mapping[str, _Shape]
    metadata: Mapping[str, str] = {}
    names: Mapping[str, str] = {}
    config: Mapping[str, Any] = {}


class Side(NamedTuple):
    """The facts and the shapes of a source or target, both by the names of its arrays."""

    stated: Mapping[str, Stated]
    shapes: Mapping[str, tuple[int, ...]]


def ties_heads(content: Any) -> bool | None:
    """True or False if a configuration states whether heads are tied to embeddings, else None.

    >>> ties_heads({"text_config": {"tie_word_embeddings": True}}), ties_heads({})
    (True, None)
    """
    found = [value for _, value in hf_config.search(content, ("tie_word_embeddings",))]
    return next((x for x in (True, False) if found and all(value is x for value in found)), None)


def shown(side: str, stated: Stated | None) -> str:
    """Returns text such as "h.0.attn of the source"; `side` alone if the layer has no name."""
    return f"{stated.layer} of {side}" if stated and stated.layer else side


class _Array(Protocol):
    @property
    def path(self) -> Path: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def of_layers(
    arrays: Mapping[str, _Array], layer_at: Callable[[Path], object]
) -> Mapping[str, Stated]:
    """Maps the name of each array to the facts of its layer, or else of the parent of that layer.

    Modules further out are not asked: their head count may be that of other attention inside them.
    """
    found, known = dict[str, Stated](), dict[Path, Stated | None]()
    for name, array in arrays.items():
        for path in (array.path[:-1], array.path[:-2])[: len(array.path)]:
            if path not in known:
                known[path] = _of_layer(".".join(path), layer_at(path))
            if (one := known[path]) is not None:
                found[name] = one
                break
    return found


def _of_layer(name: str, layer: object) -> Stated | None:
    if layer is None:
        return None
    heads = live_model.head_count(live_model.LiveModel({}, {"": layer}), "")
    found = (getattr(layer, attribute, None) for attribute in _EPSILONS)
    epsilon = next((x for x in found if isinstance(x, float)), None)
    one = Stated(name, heads, layer_semantics.of(layer), epsilon)
    return None if one == Stated(name) else one


def of_torch(arrays: Mapping[str, _Array], layers: Mapping[str, Any]) -> Mapping[str, Stated]:
    """Maps the name of each array of a torch model to the facts of its layer.

    Behaviour that a layer does not state is read from the configuration of a transformers model.
    `layers`: path -> module.
    """
    found = dict(of_layers(arrays, lambda path: layers.get(".".join(path))))
    shapes = {name: array.shape for name, array in arrays.items()}
    for name, one in _of_configurations(shapes, layers):
        own = found.get(name, one)
        found[name] = own._replace(behaviour=own.behaviour or one.behaviour)
    return found


def _of_configurations(
    shapes: Mapping[str, tuple[int, ...]], layers: Mapping[str, Any]
) -> Iterator[tuple[str, Stated]]:
    """Yields (array name, facts) from the configuration of each transformers model in a torch model.

    A transformers model inside another is left out, because the outer configuration describes it.
    """
    outer: list[str] = []
    for path, layer in layers.items():  # outer modules come before those inside them
        start = f"{path}." * bool(path)
        config: Any = getattr(layer, "config", None) if hasattr(layer, "save_pretrained") else None
        if not hasattr(config, "to_json_file") or path.startswith(tuple(outer)):
            continue
        outer.append(start)
        info = {n.removeprefix(start): _Shape(x) for n, x in shapes.items() if n.startswith(start)}
        with TemporaryDirectory() as folder:
            try:
                config.to_json_file(pathlib.Path(folder) / hf_config.CONFIG, use_diff=False)
            except (TypeError, ValueError):  # a user has set values that are not JSON
                continue
            file: Any = _InMemory(pathlib.Path(folder) / "model.safetensors", info)
            for name, one in of_file(file).items():
                yield start + name, one._replace(layer=start + one.layer)


def of_file(file: "Checkpoint") -> Mapping[str, Stated]:
    """Maps each array of an attention block to the facts that shapes, metadata or config.json state.

    Returns {} if the blocks are ambiguous.
    """
    shapes = {name: tuple(info.shape) for name, info in file.info.items()}
    try:
        blocks = behaviours.blocks(file)
    except ValueError:  # two layouts fit, or the metadata is damaged
        return {}
    configured = described.of(file, blocks).heads
    masks = attended.of_prefixes(file, blocks, [block.prefix for block in blocks], configured)
    found = dict[str, Stated]()
    for block in blocks:
        try:
            heads, _ = head_count.find(block, shapes, None, file.metadata, configured)
        except ValueError:  # the config.json gives no count for this block
            continue
        behaviour = None
        if (semantics := _semantics(block, file, configured)) is not None:
            head_dim = _head_dim(block, heads, shapes)
            rotate = _rotation(block, file, configured)
            behaviour = Behaviour(semantics, head_dim, rotate, masks[block.prefix])
        if heads is not None or behaviour is not None:
            one = Stated(block.prefix, heads, behaviour)
            found |= dict.fromkeys(block.keys.values(), one)
    return found


def _head_dim(block: Block, heads: int | None, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    arrays = {key: shapes[name] for key, name in block.keys.items()}
    try:
        return transform.bind_shapes(block.layout, arrays, heads, block.prefix).get("H")
    except ValueError:  # the head count is not known
        return None


def _semantics(
    block: Block, file: "Checkpoint", configured: "Configured | None"
) -> Semantics | None:
    """The semantics of a block; None if neither metadata nor a configuration determines them."""
    known = block.configured
    if not known and not (block.refused or block.unlike):
        model_type = _model_type(block, file, configured)
        has = {*architectures.parts(model_type), *architectures.functions(model_type)}
        known = model_type in architectures.KNOWN and not has & _FUNCTIONS
    return block.layout.semantics if known else None


def _rotation(block: Block, file: "Checkpoint", configured: "Configured | None") -> Any:
    """Returns the rotary positions by the configuration of a block; None if the model has none.

    `IN_CALL` if the configuration does not determine them.
    """
    model_type = _model_type(block, file, configured)
    if model_type not in architectures.KNOWN:
        return IN_CALL
    if "rotary" not in architectures.parts(model_type):
        return None
    place = positions.of_blocks(file, [block], configured)[block.prefix]
    if place.scheme == "none":
        return None
    simple = isinstance(place.rotary, positions.Rotary) and place.rotary.length is None
    return place.rotary if simple and place.query_scale is None else IN_CALL


def _model_type(block: Block, file: "Checkpoint", configured: "Configured | None") -> str:
    """The model type of the part of a configuration that describes a block; "" if there is none."""
    if configured and configured.wrong:
        return ""
    count = configured.part_of(block.prefix) if configured else None
    content = hf_config.readable(file.path)
    found = behaviours.part_of(content, count, block.prefix) or behaviours.part(content, ())
    return found[1]
