"""keras.layers.MultiHeadAttention, in and out. Keras is called as (query, value, key).

In its masks True means attend. Weights are known by their variable path (`query/kernel`), or by
their place in a `.weights.h5` file (`query_dense/vars/0`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxmha import MHAParams, Semantics
from jaxmha.converters import live
from jaxmha.converters.arrays import NDArray, to_numpy
from jaxmha.converters.extras import needed
from jaxmha.converters.layout import Entry, Layout
from jaxmha.converters.masks import keras as _masks
from jaxmha.converters.refusals import one_dtype
from jaxmha.converters.verbs import verbs
from jaxmha.params import check

_TIES = {"K": ("N", "keras MultiHeadAttention has as many key/value heads as query heads")}
_HOLDS = frozenset({"dropout_rate"})

_VARIABLES = (
    Entry("query/kernel", "Dq N H", ("query.kernel",)),
    Entry("query/bias", "N H", ("query.bias",), "bias"),
    Entry("key/kernel", "Dk N H", ("key.kernel",)),
    Entry("key/bias", "N H", ("key.bias",), "bias"),
    Entry("value/kernel", "Dv N h", ("value.kernel",)),
    Entry("value/bias", "N h", ("value.bias",), "bias"),
    Entry("attention_output/kernel", "N h Do", ("out.kernel",)),
    Entry("attention_output/bias", "Do", ("out.bias",), "bias"),
)
VARIABLES = Layout(
    "keras",
    _VARIABLES,
    ties=_TIES,
    separator="/",
    holds=_HOLDS,
    about="keras.layers.MultiHeadAttention, keys are variable paths",
)
_FILE_GROUPS = {
    "query": "query_dense",
    "key": "key_dense",
    "value": "value_dense",
    "attention_output": "output_dense",
}
WEIGHTS_FILE = replace(
    VARIABLES,
    name="keras-file",
    entries=tuple(
        entry._replace(key=f"{_FILE_GROUPS[layer]}/vars/{int(leaf == 'bias')}")
        for entry in VARIABLES.entries
        for layer, leaf in [entry.key.split("/")]
    ),
    about="keras.layers.MultiHeadAttention, keys as in a .weights.h5 file",
)
# The same variables with fewer key/value heads, as keras.layers.GroupQueryAttention has them.
GROUPED = replace(
    VARIABLES,
    name="keras-gqa",
    entries=tuple(
        entry._replace(axes=entry.axes.replace("N", "K"))
        if entry.key.startswith(("key/", "value/"))
        else entry
        for entry in VARIABLES.entries
    ),
    ties={
        "h": ("H", "keras GroupQueryAttention has value heads as wide as query heads"),
        "Do": ("Dq", "keras GroupQueryAttention has an output as wide as its query input"),
    },
    about="keras.layers.GroupQueryAttention, keys are variable paths",
)
GROUPED_FILE = replace(
    GROUPED,
    name="keras-gqa-file",
    entries=tuple(
        file_entry._replace(key=f"_{file_entry.key}", axes=entry.axes)
        for file_entry, entry in zip(WEIGHTS_FILE.entries, GROUPED.entries, strict=True)
    ),
    about="keras.layers.GroupQueryAttention, keys as in a .weights.h5 file",
)
LAYOUTS = (VARIABLES, GROUPED, WEIGHTS_FILE, GROUPED_FILE)
# In a .weights.h5 file: the layout of either, and the group that Keras names after the class.
IN_FILE = {
    VARIABLES.name: (WEIGHTS_FILE, "multi_head_attention"),
    GROUPED.name: (GROUPED_FILE, "grouped_query_attention"),
}
import_params, export_params = verbs(LAYOUTS)
import_masks, export_masks = _masks.import_masks, _masks.export_masks
implicit_masks = _masks.implicit_masks


def from_module(layer: Any, variables: None = None) -> tuple[MHAParams, Semantics]:
    """Parameters and behaviour of a built `keras.layers.MultiHeadAttention` or
    `GroupQueryAttention`; nothing is shared.

    Raises:
      TypeError: it is not one.
      ValueError: it is not built, or uses what has no counterpart here (gate, several attention
        axes, sliding_window), named.

    An `output_shape` of several axes is one axis here, their product: reshape the output to it.
    """
    if not isinstance(layer, _classes()):
        by_hand = live.by_hand(layer, "keras", "jaxmha.converters.live.keras(layer).state")
        raise TypeError(
            "expected a keras.layers.MultiHeadAttention or GroupQueryAttention, got "
            f"{type(layer).__name__}: "
            + (by_hand or "for a model take its layers, for a flat dict of arrays import_params")
        )
    if not layer.built:
        raise ValueError(
            f"layer {layer.name!r} has no weights yet: call it once, or "
            "layer.build(query_shape, value_shape, key_shape)"
        )
    config = layer.get_config()
    for setting, refused, remedy in _REFUSED:
        if refused(config.get(setting)):
            raise ValueError(
                f"layer {layer.name!r} has {setting}={config[setting]!r}, which {remedy}"
            )
    state = {"/".join(w.path.split("/")[-2:]): to_numpy(w) for w in layer.weights}
    if np.size(config.get("output_shape")) > 1:
        kernel, bias = "attention_output/kernel", "attention_output/bias"
        state[kernel] = state[kernel].reshape(*state[kernel].shape[:2], -1)
        state |= {bias: state[bias].reshape(-1)} if bias in state else {}
    grouped = "num_key_value_heads" in config
    params, semantics = import_params(state, layout=(GROUPED if grouped else VARIABLES).name)
    return params, replace(semantics, dropout_rate=float(config["dropout"]))


def _classes() -> tuple[Any, ...]:
    with needed("keras"):
        import keras

    return keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention


_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("use_gate", bool, "jaxmha has no counterpart for: the gate's weights would be dropped"),
    (
        "attention_axes",
        lambda axes: axes is not None and tuple(np.atleast_1d(axes)) != (1,),
        "attends over other axes than the second: move that axis there, or flatten several",
    ),
    (
        "sliding_window",
        lambda window: window is not None,
        "is a mask and not a weight: pass Mask.window(w - 1, w - 1), and import_params(weights)",
    ),
)


def to_module(
    params: MHAParams,
    semantics: Semantics = Semantics(),
    *,
    kind: Literal["mha", "gqa"] | None = None,
    like: Any = None,
) -> Any:
    """A built `keras.layers.MultiHeadAttention` with these weights, or with fewer key/value
    heads or `kind="gqa"` a `GroupQueryAttention`; loaded strictly.

    `like`: a layer whose other settings are kept: initialisers, regularisers, constraints, seed,
    dtype policy and an `output_shape` of several axes, where the weights fit it.

    Raises:
      ValueError: Keras' layer cannot hold the parameters or the behaviour, with the reason; or
        its backend would change the dtype.
    """
    with needed("keras"):
        import keras

    if kind not in (None, "mha", "gqa"):
        raise ValueError(f"kind must be 'mha' or 'gqa', got {kind!r}")
    sizes = check(params)
    grouped = kind == "gqa" or (kind is None and sizes["K"] != sizes["N"])
    one_dtype(params)
    layout = GROUPED if grouped else VARIABLES
    state = export_params(params, semantics, layout=layout.name)
    settings = {
        "dropout": semantics.dropout_rate,
        "use_bias": params.query.bias is not None,
        "dtype": state["query/kernel"].dtype.name,
    }
    if like is not None:
        settings = _settings_of(like, grouped, sizes["Do"]) | settings
    if grouped:
        layer = keras.layers.GroupQueryAttention(sizes["H"], sizes["N"], sizes["K"], **settings)
    else:
        width = None if sizes["Do"] == sizes["Dq"] else sizes["Do"]
        settings = {"output_shape": width, **settings}
        layer = keras.layers.MultiHeadAttention(
            sizes["N"], sizes["H"], value_dim=sizes["h"], **settings
        )
    layer.build(*((None, None, sizes[width]) for width in ("Dq", "Dv", "Dk")))
    there = {"/".join(w.path.split("/")[-2:]): w for w in layer.weights}
    assert there.keys() == state.keys(), (there.keys(), state.keys())
    for key, variable in there.items():
        variable.assign(state[key].reshape(variable.shape))
        kept = to_numpy(variable).reshape(state[key].shape)
        if kept.dtype != state[key].dtype or kept.tobytes() != state[key].tobytes():
            raise ValueError(
                f"keras with backend {keras.backend.backend()} keeps {key} as {kept.dtype}, not "
                f"{state[key].dtype}: on the JAX backend float64 needs jax_enable_x64"
            )
    return layer


# Settings that come from weights and behaviour, and are never taken from `like`.
_SAID = frozenset(
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


def _settings_of(like: Any, grouped: bool, Do: int) -> dict[str, Any]:
    """The settings that `to_module` keeps of another layer."""
    if not isinstance(like, _classes()):
        raise TypeError(
            "like must be a keras.layers.MultiHeadAttention or GroupQueryAttention, got "
            f"{type(like).__name__}"
        )
    config = {k: v for k, v in like.get_config().items() if k not in _SAID}
    shape = config.pop("output_shape", None)
    if not grouped and shape is not None and np.prod(shape) == Do:
        config["output_shape"] = shape
    built = type(like).from_config(like.get_config()).get_config()  # settings as objects again
    config.pop("build_config", None)
    config["dtype"] = like.dtype_policy
    return {k: v for k, v in config.items() if k in built or k == "dtype"}


def attention_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Every attention layer in a model by its name; "" for the model itself."""
    if isinstance(model, _classes()):
        yield "", model
        return
    seen: set[int] = set()
    for layer in model._flatten_layers(include_self=False, recursive=True):
        if isinstance(layer, _classes()) and id(layer) not in seen:
            seen.add(id(layer))
            yield layer.name, layer


def forward(
    layer: Any, query: NDArray, key: NDArray, value: NDArray, mask: NDArray | None = None
) -> NDArray:
    """Runs the live layer on `(B, T, Dq)`, `(B, S, Dk)`, `(B, S, Dv)`, without dropout.

    `mask` is canonical: Boolean `(B, N or 1, T or 1, S)`, True = attend.
    """
    if mask is not None and mask.shape[1] == 1:
        mask = mask[:, 0]
    options = {"attention_mask": mask, "training": False}
    wide = getattr(layer, "value_dim", None) != getattr(layer, "key_dim", None)
    if wide:  # without scores Keras on JAX cannot run this
        return to_numpy(layer(query, value, key, return_attention_scores=True, **options)[0])
    return to_numpy(layer(query, value, key, **options))
