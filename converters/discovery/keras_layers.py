"""Finds the attention layers of a Keras model, and the masks that reach each of them."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxmha.converters.discovery import live_model, user_names
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.extras import needed

if TYPE_CHECKING:
    import keras


class Arrived(NamedTuple):
    """The masks that reach one call of one attention layer.

    Attributes:
      layer: the name of the layer; "" if the caller passed the layer itself.
      arguments: the masks that reached it, as arguments of `import_masks`.
      lost: masks that did not reach it, although a tensor carries them according to the graph of a
        functional model or the inputs of a layer.
    """

    layer: str
    arguments: dict[str, Any]
    lost: tuple[str, ...]


def attention_classes() -> tuple[Any, ...]:
    with needed("keras"):
        import keras

    return keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention


def attention_layers(model: "keras.Layer") -> Iterator[tuple[str, "keras.Layer"]]:
    """Name and layer of every attention layer in a model; "" for the model itself.

    Layers that share a name are called by their paths in the weights file, such as
    `layers/encoder_1/attention`; so is a layer whose name is the path of another.
    """
    if isinstance(model, attention_classes()):
        yield "", model
        return
    found = {
        id(layer): layer
        for layer in model._flatten_layers(include_self=False, recursive=True)
        if isinstance(layer, attention_classes())
    }
    paths = {id(one): path for path, one in live_model.keras(model).layers.items()}
    # A layer outside of the attributes that Keras saves has no path: its name and a number stand in.
    layers = {paths.get(key, f"{one.name}#{n}"): one for n, (key, one) in enumerate(found.items())}
    names = user_names.distinct_names(layers, {path: one.name for path, one in layers.items()})
    for path, one in layers.items():
        yield names[path], one


def implicit_masks(
    model: "keras.Layer", *inputs: "keras.KerasTensor", **options: object
) -> list[Arrived]:
    """Calls a model or attention layer, and records which masks reach each attention layer.

    Keras loses masks: MultiHeadAttention erases the masks of its input tensors, so a second layer
    on the same tensors runs unmasked (in a post-norm stack, every layer but the first). This
    function leaves the masks of the inputs unchanged.

    Source: keras/src/layers/layer.py, `Layer.__call__`, and the two layers' `call`.
    """
    tensors: list[Any] = [
        x for x in (*inputs, *options.values()) if getattr(x, "_keras_mask", None) is not None
    ]
    masks = [x._keras_mask for x in tensors]
    layers = list(attention_layers(model))
    planned = {id(layer): list(_planned(layer)) for _, layer in layers}
    if layers and layers[0][1] is model:
        call = inspect.signature(model.call).bind(*inputs, **options).arguments
        planned = {id(model): [_carried(call)]}
    calls: list[tuple[Any, str, dict[str, Any]]] = []
    with contextmanager(_recorded)(layers, calls):
        model(*inputs, **options)
    for tensor, mask in zip(tensors, masks, strict=True):
        tensor._keras_mask = mask
    arrived = []
    for layer, name, arguments in calls:
        rest = planned[id(layer)]
        carried = rest.pop(0) if rest else ()
        lost = tuple(mask for mask in carried if mask not in arguments)
        arrived.append(Arrived(name, arguments, lost))
    return arrived


def _planned(layer: "keras.Layer") -> Iterator[tuple[str, ...]]:
    """The masks carried by the symbolic inputs of each call of a layer in a functional model."""
    for node in layer._inbound_nodes:
        call = inspect.signature(layer.call)
        yield _carried(call.bind(*node.arguments.args, **node.arguments.kwargs).arguments)


def _carried(call: dict[str, Any]) -> tuple[str, ...]:
    """Names of the masks that the input tensors of a call carry; an omitted `key` carries none."""
    names = ["query", "value"] + ["key"] * (call.get("key") is not None)
    return tuple(
        f"{name}_mask" for name in names if getattr(call[name], "_keras_mask", None) is not None
    )


def _recorded(
    layers: list[tuple[str, Any]], calls: list[tuple[Any, str, dict[str, Any]]]
) -> Iterator[None]:
    """Appends (layer, name, mask arguments) of every layer call to `calls`.

    Methods of the layers are replaced while the context is open.
    """

    def watch(name: str, layer: "keras.Layer") -> None:
        merge, compute = layer._compute_attention_mask, layer._compute_attention
        window = getattr(layer, "_sliding_window", getattr(layer, "sliding_window", None))
        always = {"kind": "gqa" if hasattr(layer, "num_query_heads") else "mha", "implicit": True}
        noted: dict[str, Any] = {}

        def noting_merge(*args: Any, **kwargs: Any) -> Any:
            for key, value in kwargs.items():
                if key != "use_causal_mask" and value is not None:
                    noted[key] = to_numpy(value)
            noted["use_causal_mask"] = kwargs.get("use_causal_mask", False)
            return merge(*args, **kwargs)

        def noting_compute(*args: Any, **kwargs: Any) -> Any:
            causal = {"use_causal_mask": bool(kwargs.get("use_causal_mask", False))}
            window_of = {} if window is None else {"sliding_window": window}
            calls.append((layer, name, always | window_of | causal | noted))
            noted.clear()
            return compute(*args, **kwargs)

        vars(layer).update(_compute_attention_mask=noting_merge, _compute_attention=noting_compute)

    for name, layer in layers:
        watch(name, layer)
    try:
        yield
    finally:
        for _, layer in layers:
            del vars(layer)["_compute_attention_mask"], vars(layer)["_compute_attention"]
