"""Imports and exports keras.layers.MultiHeadAttention and GroupQueryAttention.

Keras layers are called as (query, value, key). True in their masks means attend. Keys of weights
are variable paths (`query/kernel`), or paths in a `.weights.h5` file (`query_dense/vars/0`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxmha import MHAParams, Semantics
from jaxmha.converters.discovery import live_model, torch_hooks
from jaxmha.converters.discovery.keras_equations import refuse_equations
from jaxmha.converters.discovery.keras_layers import (
    attention_classes,
    attention_layers,
    implicit_masks,
)
from jaxmha.converters.discovery.layer_semantics import OF_KERAS, keras_rank, keras_semantics
from jaxmha.converters.discovery.live_model import keras as tensors_of
from jaxmha.converters.discovery.own_forward import Settings, refuse_own_forward, refuse_settings
from jaxmha.converters.layout.api import make_api
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.layout.keras import (
    GROUPED,
    GROUPED_FILE,
    IN_FILE,
    LAYOUTS,
    VARIABLES,
    WEIGHTS_FILE,
)
from jaxmha.converters.layout.validation import one_dtype
from jaxmha.converters.masks.keras import export_masks, import_masks
from jaxmha.converters.matching.load_into import make_load_into
from jaxmha.extras import needed
from jaxmha.params import check

if TYPE_CHECKING:
    import keras

__all__ = [
    "GROUPED",
    "GROUPED_FILE",
    "IN_FILE",
    "LAYOUTS",
    "VARIABLES",
    "WEIGHTS_FILE",
    "attention_layers",
    "export_masks",
    "export_params",
    "from_module",
    "implicit_masks",
    "import_masks",
    "import_params",
    "load_into",
    "tensors_of",
    "to_module",
]

import_params, export_params = make_api(LAYOUTS)
load_into = make_load_into(
    "into_keras",
    "a built Keras model or layer",
    "Assigns the variables of a Keras model.",
)


def from_module(layer: "keras.Layer", variables: None = None) -> tuple[MHAParams, Semantics]:
    """Parameters and behaviour of a built `keras.layers.MultiHeadAttention` or
    `GroupQueryAttention`, as copies.

    Raises:
      TypeError: the layer is neither of the two.
      ValueError: the layer is not built; its class, the layer itself or a sublayer overrides a
        method that computes outputs; or it has a window and attends over another axis than 1.

    `sliding_window` and `attention_axes` become fields of the semantics; `multi_head_attention`
    applies them to inputs with as many axes as those of the layer. For inputs of more than three
    axes give both to `import_masks`, `attention_axes=semantics.attention_axes, input_axes=x.ndim`:
    Keras' masks lack axes that jaxmha has.

    If `output_shape` has several axes, the parameters merge them into one: reshape the output of
    jaxmha to `output_shape`.
    """
    if not isinstance(layer, attention_classes()):
        by_hand = live_model.by_hand(
            lambda: tensors_of(layer), "jaxmha.converters.keras.tensors_of(layer).state"
        )
        raise TypeError(
            "expected a keras.layers.MultiHeadAttention or GroupQueryAttention, got "
            f"{type(layer).__name__}: "
            + (by_hand or "for a model take its layers, for a flat dict of arrays import_params")
        )
    instead = "import_params(tensors_of(layer).state)"
    of_torch = hasattr(layer, "_forward_hooks")  # with Keras' torch backend
    inherited = torch_hooks.COMPUTING if of_torch else ("__call__",)
    refuse_own_forward(layer, attention_classes(), (*OF_KERAS, *inherited), instead)
    if of_torch:
        torch_hooks.refuse_hooks(layer, "layer")
    for name, kind, activation in _sublayers():
        if (sublayer := getattr(layer, name, None)) is not None:
            refuse_own_forward(sublayer, (kind,), ("call", *inherited), instead, name)
            refuse_settings(sublayer, activation, instead, name)
            if of_torch:
                torch_hooks.refuse_hooks(sublayer, f"layer.{name}")
    if layer.built:
        refuse_equations(layer, instead)
    return weights_of(layer)


def _sublayers() -> Iterator[tuple[str, Any, Settings]]:
    """Attribute, class and activation of the sublayers that `build` makes."""
    import keras

    for name in ("_query_dense", "_key_dense", "_value_dense", "_output_dense", "_gate_dense"):
        own = keras.activations.sigmoid if name == "_gate_dense" else keras.activations.linear
        yield name, keras.layers.EinsumDense, {"activation": (own,)}
    yield "_softmax", keras.layers.Softmax, {}
    yield "_dropout_layer", keras.layers.Dropout, {}


def weights_of(layer: "keras.Layer") -> tuple[MHAParams, Semantics]:
    """Parameters and behaviour of a built layer, even if its class overrides `call` etc."""
    if not layer.built:
        raise ValueError(
            f"layer {layer.name!r} has no weights yet: call it once, or "
            "layer.build(query_shape, value_shape, key_shape)"
        )
    config = layer.get_config()
    state = {"/".join(w.path.split("/")[-2:]): to_numpy(w) for w in layer.weights}
    if np.size(config.get("output_shape")) > 1:
        kernel, bias = "attention_output/kernel", "attention_output/bias"
        state[kernel] = state[kernel].reshape(*state[kernel].shape[:2], -1)
        state |= {bias: state[bias].reshape(-1)} if bias in state else {}
    grouped = "num_key_value_heads" in config
    params, semantics = import_params(state, layout=(GROUPED if grouped else VARIABLES).name)
    semantics = keras_semantics(layer, semantics)
    _refuse_window(config.get("sliding_window"), semantics.attention_axes, keras_rank(layer))
    return params, semantics


def _refuse_window(window: int | None, axes: tuple[int, ...] | None, rank: int) -> None:
    """Raises ValueError for a window over other axes than axis 1 of inputs with `rank` axes.

    Keras takes the sizes of its mask from axis 1. It fails if the attended axis has another size,
    and drops the window if axis 1 has size 1.
    """
    if window is not None and axes is not None and [axis % rank for axis in axes] != [1]:
        raise ValueError(
            f"sliding_window={window} with attention_axes={axes}: keras makes its window for axis 1 of "
            "the inputs, whichever axes are attended: leave it out, and pass the window within "
            "attention_mask"
        )


def to_module(
    params: MHAParams,
    semantics: Semantics = Semantics(),
    *,
    kind: Literal["mha", "gqa"] | None = None,
    like: "keras.Layer | None" = None,
) -> "keras.Layer":
    """A built Keras attention layer with these weights.

    The layer is a `GroupQueryAttention` if `kind="gqa"`, or if `kind` is None and `like` is one, or
    there are fewer key/value heads than query heads; otherwise it is a `MultiHeadAttention`.

    `like`: a layer from which other settings are copied: initialisers, regularisers, constraints,
    seed, dtype policy if its variables have the dtype of the weights, and an `output_shape` of
    several axes if the weights fit it. With `semantics.attention_axes`, inputs have as many axes as
    those of `like`, if it is built; otherwise as few as the attended axes need, at least 4. Without
    `like`, a mixed dtype policy such as `mixed_bfloat16` is lost, because `semantics` does not hold
    it: the layer computes in the dtype of the weights.

    Raises:
      ValueError: Keras' layer cannot hold the parameters or the behaviour (the message says why),
        or its backend would change the dtype.
    """
    with needed("keras"):
        import keras

    if kind not in (None, "mha", "gqa"):
        raise ValueError(f"kind must be 'mha' or 'gqa', got {kind!r}")
    sizes = check(params)
    of_groups = isinstance(like, keras.layers.GroupQueryAttention) or sizes["K"] != sizes["N"]
    grouped = kind == "gqa" or (kind is None and of_groups)
    one_dtype(params)
    gate = params.gate
    if gate is not None and (gate.bias is None) != (params.query.bias is None):
        raise ValueError(
            "keras has biases for all projections or for none (use_bias), and params.gate has "
            f"{'none' if gate.bias is None else 'one'} unlike params.query (a bias of zeros changes "
            "nothing)"
        )
    layout = GROUPED if grouped else VARIABLES
    own = replace(semantics, local_window_size=None)
    own = own if grouped else replace(own, attention_axes=None)
    state = export_params(params, own, layout=layout.name)
    window, rank = _sliding_window(semantics), _rank_of(semantics.attention_axes, like)
    _refuse_window(window, semantics.attention_axes, rank)
    settings: dict[str, Any] = {
        "sliding_window": window,
        "dropout": semantics.dropout_rate,
        "use_bias": params.query.bias is not None,
        "use_gate": gate is not None,
    }
    dtype = state["query/kernel"].dtype.name
    copied = {} if like is None else _settings_of(like, grouped, sizes["Do"], dtype)
    settings = {"dtype": dtype} | copied | settings
    if grouped:
        layer = keras.layers.GroupQueryAttention(sizes["H"], sizes["N"], sizes["K"], **settings)
    else:
        width = None if sizes["Do"] == sizes["Dq"] else sizes["Do"]
        settings = {"output_shape": width, "attention_axes": semantics.attention_axes, **settings}
        layer = keras.layers.MultiHeadAttention(
            sizes["N"], sizes["H"], value_dim=sizes["h"], **settings
        )
    layer.build(*((None,) * (rank - 1) + (sizes[width],) for width in ("Dq", "Dv", "Dk")))
    variables_of = {"/".join(w.path.split("/")[-2:]): w for w in layer.weights}
    assert variables_of.keys() == state.keys(), (variables_of.keys(), state.keys())
    for key, variable in variables_of.items():
        variable.assign(state[key].reshape(variable.shape))
        kept = to_numpy(variable).reshape(state[key].shape)
        if kept.dtype != state[key].dtype or kept.tobytes() != state[key].tobytes():
            raise ValueError(
                f"keras with backend {keras.backend.backend()} keeps {key} as {kept.dtype}, not "
                f"{state[key].dtype}: on the JAX backend float64 needs jax_enable_x64"
            )
    return layer


def _rank_of(axes: tuple[int, ...] | None, like: "keras.Layer | None") -> int:
    """The number of input axes: 3 without attended `axes`, else that of a built `like`, else at
    least 4."""
    if axes is None:
        return 3
    if like is not None and like.built:
        return keras_rank(like)
    return max(4, *(axis + 2 if axis >= 0 else 1 - axis for axis in axes))


def _sliding_window(semantics: Semantics) -> int | None:
    """Keras' setting for a window; None without one.

    Raises ValueError unless the window has as many keys before a query as after it.
    """
    window = semantics.local_window_size
    if window is None:
        return None
    left, right = window
    if left is None or left != right:
        raise ValueError(
            f"semantics.local_window_size={window}: Keras' sliding_window has the same bound to the "
            "left and right; give the rest of the window as a causal mask"
        )
    return left + 1


# Settings that weights and semantics determine, and that are never copied from `like`.
_DERIVED = frozenset(
    [
        "num_heads",
        "key_dim",
        "value_dim",
        "head_dim",
        "num_query_heads",
        "num_key_value_heads",
        "dropout",
        "use_bias",
        "name",
        "use_gate",
        "sliding_window",
        "attention_axes",
    ]
)


def _settings_of(like: "keras.Layer", grouped: bool, Do: int, dtype: str) -> dict[str, Any]:
    """The settings that `to_module` copies from another layer."""
    if not isinstance(like, attention_classes()):
        raise TypeError(
            "like must be a keras.layers.MultiHeadAttention or GroupQueryAttention, got "
            f"{type(like).__name__}"
        )
    config = {k: v for k, v in like.get_config().items() if k not in _DERIVED}
    shape = config.pop("output_shape", None)
    if not grouped and shape is not None and np.prod(shape) == Do:
        config["output_shape"] = shape
    built = type(like).from_config(like.get_config()).get_config()  # of an unbuilt copy
    config.pop("build_config", None)
    config.pop("dtype", None)
    settings = {k: v for k, v in config.items() if k in built}
    policy = like.dtype_policy
    same = policy.variable_dtype == dtype and not getattr(policy, "quantization_mode", None)
    return settings | {"dtype": policy} if same else settings


def forward(
    layer: "keras.Layer",
    query: NDArray,
    key: NDArray,
    value: NDArray,
    mask: NDArray | None = None,
) -> NDArray:
    """Runs the layer on `(B, T, Dq)`, `(B, S, Dk)`, `(B, S, Dv)`, without dropout.

    `mask` is canonical: Boolean `(B, N or 1, T or 1, S)`, True = attend.
    """
    rank = keras_rank(layer)
    if rank > 3:
        return _forward_along(layer, rank, query, key, value, mask)
    if mask is not None and mask.shape[1] == 1:
        mask = mask[:, 0]
    options = {"attention_mask": mask, "training": False}
    if needs_scores(layer):
        return to_numpy(layer(query, value, key, return_attention_scores=True, **options)[0])
    return to_numpy(layer(query, value, key, **options))


def needs_scores(layer: "keras.Layer") -> bool:
    """True if the head widths of keys and values differ: Keras on JAX can then only run the path
    that returns scores."""
    return getattr(layer, "value_dim", None) != getattr(layer, "key_dim", None)


def _forward_along(
    layer: "keras.Layer",
    rank: int,
    query: NDArray,
    key: NDArray,
    value: NDArray,
    mask: NDArray | None,
) -> NDArray:
    """`forward` of a layer whose inputs have more than three axes: T and S become the first
    attended axis, and all other axes have size 1."""
    axes = layer.attention_axes
    placed = [
        x.reshape(
            len(x), *(x.shape[1] if axis == axes[0] else 1 for axis in range(1, rank - 1)), -1
        )
        for x in (query, value, key)
    ]
    if mask is not None:  # B, unattended axes, N, attended axes of queries, of keys
        B, N, T, S = mask.shape
        ones = (1,) * (len(axes) - 1)
        mask = mask.reshape(B, *(1,) * (rank - 2 - len(axes)), N, T, *ones, S, *ones)
    out = to_numpy(layer(*placed, attention_mask=mask, training=False))
    return out.reshape(*query.shape[:2], *out.shape[rank - 1 :])
