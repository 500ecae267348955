"""Collects the tensors of a model in memory, under the names by which its framework saves them."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from keras import Layer
    from torch import nn

# Attributes in which hand-written attention classes keep the head count.
HEADS = (
    "num_heads",
    "n_heads",
    "nheads",
    "nhead",
    "n_head",
    "num_attention_heads",
    "heads",
    "_n_heads",
    "h",
)


class LiveModel(NamedTuple):
    """The tensors and layers of a model in memory.

    Attributes:
      state: name -> tensor of the framework, not copied.
      layers: path -> layer, for known layers.
      names: path -> name of the layer; only for Keras.
    """

    state: Mapping[str, Any]
    layers: Mapping[str, Any]
    names: Mapping[str, str] = {}


def torch(module: "nn.Module") -> LiveModel:
    """The state dict of a torch module, and its layers by path.

    >>> from torch import nn
    >>> sorted(torch(nn.Sequential(nn.Linear(3, 2))).state)
    ['0.bias', '0.weight']
    """
    state = module.state_dict()
    return LiveModel(state, dict(module.named_modules(remove_duplicate=False)))


def keras(model: "Layer") -> LiveModel:
    """The arrays that `save_weights` of a Keras model or layer would write, by the same names.

    >>> from keras import layers
    >>> layer = layers.Dense(2)
    >>> layer.build((None, 3))
    >>> {name: tuple(array.shape) for name, array in keras(layer).state.items()}
    {'vars/0': (3, 2), 'vars/1': (2,)}
    """
    found = LiveModel({}, {}, {})
    _visit(model, "", found, set())
    return found


def _visit(layer: Any, path: str, found: Any, seen: set[int]) -> None:
    if id(layer) in seen:
        return
    seen.add(id(layer))
    own: dict[str, Any] = {}
    if hasattr(layer, "save_own_variables"):
        layer.save_own_variables(own)
    found.layers[path] = layer
    if isinstance(getattr(layer, "name", None), str):
        found.names[path] = layer.name
    for key, value in own.items():
        found.state["/".join(part for part in (path, "vars", key) if part)] = value
    for child, where in _children(layer, path):
        _visit(child, where, found, seen)


def _children(layer: Any, path: str) -> Iterator[tuple[Any, str]]:
    from keras.src.saving.keras_saveable import KerasSaveable
    from keras.src.saving.saving_lib import _walk_saveable
    from keras.src.utils.naming import to_snake_case

    for attribute, child in _walk_saveable(layer):
        where = f"{path}/{attribute}" if path else attribute
        if isinstance(child, KerasSaveable):
            yield child, where
        elif isinstance(child, list | tuple | dict):
            used: dict[str, int] = {}
            for item in child.values() if isinstance(child, dict) else child:
                if isinstance(item, KerasSaveable):
                    name = to_snake_case(type(item).__name__)
                    used[name] = used.get(name, -1) + 1
                    yield item, f"{where}/{name}{f'_{used[name]}' * (used[name] > 0)}"


def flax(module: Any, variables: Any = None) -> LiveModel:
    """The state of an nnx module without random states, or the variables of a linen module.

    Args:
      module: an nnx or linen module.
      variables: of a linen module: the dict that `init` returns, or its `params`.

    >>> from flax import nnx
    >>> sorted(flax(nnx.Linear(3, 2, rngs=nnx.Rngs(0))).state)
    ['bias', 'kernel']
    """
    from flax import nnx
    from flax.core import meta
    from flax.traverse_util import flatten_dict

    if variables is not None:
        unboxed = meta.unbox(dict(variables))
        collections = unboxed if "params" in variables else {"params": unboxed}
        state = {}
        for collection, tree in collections.items():
            prefix = () if collection == "params" else (collection,)
            for path, leaf in flatten_dict(dict(tree)).items():
                state["/".join(map(str, (*prefix, *path)))] = leaf
        return LiveModel(state, {"": module})
    _, kept = nnx.split_state(nnx.state(module), nnx.RngState, ...)
    state = {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(kept)}
    layers = {"/".join(map(str, path)): one for path, one in nnx.iter_modules(module)}
    return LiveModel(state, layers)


def equinox(module: Any) -> LiveModel:
    """The arrays of an equinox module by the paths of their attributes, and its modules by path.

    >>> from equinox import nn
    >>> import jax
    >>> sorted(equinox(nn.Linear(3, 2, key=jax.random.key(0))).state)
    ['bias', 'weight']
    """
    found = LiveModel({}, {})
    _visit_tree(module, "", found)
    return found


def _visit_tree(node: Any, path: str, found: Any) -> None:
    import jax
    from equinox import Module

    found.layers[path] = node
    inner = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node and isinstance(x, Module)
    )[0]
    for keys, one in inner:
        parts = (
            str(next(getattr(key, a) for a in ("name", "key", "idx") if hasattr(key, a)))
            for key in keys
        )
        where = ".".join(part for part in (path, *parts) if part)
        if isinstance(one, Module):
            _visit_tree(one, where, found)
        elif hasattr(one, "dtype") and not jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
            found.state[where] = one


def under(whole: LiveModel, layer: object) -> set[str]:
    """Names of the tensors that belong to a layer of the model."""
    paths = [path for path, one in whole.layers.items() if one is layer]
    return {
        name
        for name in whole.state
        if any(not p or name.startswith((f"{p}.", f"{p}/")) for p in paths)
    }


def head_count(whole: LiveModel, prefix: str) -> int | None:
    """The head count from an attribute of a hand-written layer, a sublayer, or the model's config.

    None if none of them has one of the `HEADS`.

    >>> from types import SimpleNamespace
    >>> head_count(LiveModel({}, {"attn": SimpleNamespace(nhead=8)}), "attn")
    8
    """
    starts = (f"{prefix}.", f"{prefix}/")
    within = [one for path, one in whole.layers.items() if path.startswith(starts) or not prefix]
    own = [whole.layers.get(prefix), *within]
    for one in (*own, getattr(whole.layers.get(""), "config", None)):
        for name in HEADS:
            value = _attribute(one, name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _attribute(one: object, name: str) -> object:
    """An attribute; None if it has no value: properties raise errors of their own, such as those of
    configurations of transformers whose layers have different counts."""
    try:
        return getattr(one, name, None)
    except Exception:  # noqa: BLE001
        return None


def by_hand(read: Callable[[], LiveModel], state: str) -> str:
    """Advice on importing the weights of a hand-written class; "" if no layout has its names.

    `read` collects the tensors of the model; `state` is the Python expression, shown to the user,
    for its flat dict of arrays.
    """
    from jaxmha.converters.discovery.attention_blocks import find
    from jaxmha.converters.layout import linear

    try:
        whole = read()
        shapes = {name: tuple(x.shape) for name, x in whole.state.items() if hasattr(x, "shape")}
        found = find(shapes)
    except (ValueError, TypeError, AttributeError):
        return ""
    if len(found) != 1 or found[0].layout not in linear.LAYOUTS:
        return ""
    (block,) = found
    heads = head_count(whole, block.prefix) or "N"
    where = f", prefix={block.prefix!r}" * bool(block.prefix)
    return (
        "a class of your own may compute anything. If it computes attention, its weights are "
        f"jaxmha.converters.linear.import_params({state}, layout={block.layout.name!r}, "
        f"num_heads={heads}{where})"
    )
