"""Parameter layouts of Keras MultiHeadAttention and GroupedQueryAttention, also in files."""

from dataclasses import replace

from jaxmha.converters.layout.base import Entry, Layout

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
    Entry("gate/kernel", "Dq N h", ("gate.kernel",), "gate"),
    Entry("gate/bias", "N h", ("gate.bias",), "gate bias"),
)
VARIABLES = Layout(
    "keras",
    _VARIABLES,
    ties=_TIES,
    separator="/",
    holds=_HOLDS,
    convention="keras",
    about="keras.layers.MultiHeadAttention, keys are variable paths",
)
_FILE_GROUPS = {
    "query": "query_dense",
    "key": "key_dense",
    "value": "value_dense",
    "attention_output": "output_dense",
    "gate": "_gate_dense",  # the attribute that holds it is private
}
WEIGHTS_FILE = replace(
    VARIABLES,
    name="keras-file",
    entries=tuple(
        entry._replace(key=f"{_FILE_GROUPS[layer]}/vars/{int(leaf == 'bias')}")
        for entry in VARIABLES.entries
        for layer, leaf in [entry.key.split("/")]
    ),
    convention="keras-file",
    about="keras.layers.MultiHeadAttention, keys as in a .weights.h5 file",
)
# The same variables with fewer key/value heads, as in keras.layers.GroupQueryAttention.
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
        file_entry._replace(key=f"_{file_entry.key.removeprefix('_')}", axes=entry.axes)
        for file_entry, entry in zip(WEIGHTS_FILE.entries, GROUPED.entries, strict=True)
    ),
    convention="keras-file",
    about="keras.layers.GroupQueryAttention, keys as in a .weights.h5 file",
)
LAYOUTS = (VARIABLES, GROUPED, WEIGHTS_FILE, GROUPED_FILE)
# Layout -> its layout in a .weights.h5 file, and the group name that Keras derives from the class.
IN_FILE = {
    VARIABLES.name: (WEIGHTS_FILE, "multi_head_attention"),
    GROUPED.name: (GROUPED_FILE, "grouped_query_attention"),
}
