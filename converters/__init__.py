"""Imports and exports weights and masks of other frameworks: one module per framework, one API.

`import_params` and `export_params` work on flat dicts of arrays, `from_module` and `to_module` on
layer objects. Layers of haiku exist only inside a transformed function, so `haiku.from_module` and
`haiku.to_module` work on their parameters. Importing a module of this package imports no framework;
a call of its functions does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

    from jaxmha import MHAParams, Semantics
    from jaxmha.converters.discovery.attended import Attended
    from jaxmha.converters.discovery.positions import Positions
    from jaxmha.converters.layout.base import Layout
    from jaxmha.converters.masks.lint_rules import Finding
    from jaxmha.converters.matching import Plan
    from jaxmha.converters.matching.plan import Packing
    from jaxmha.converters.verify.attribution import Attribution
    from jaxmha.introspect.graph import DataFlow

__all__ = [
    "attribute",
    "config_of",
    "describe",
    "layouts",
    "lint_masks",
    "masks_of",
    "match",
    "plot_attention",
    "positions_of",
]


def layouts() -> "dict[str, Layout]":
    """Every known layout by name, with its entries and limits.

    >>> layouts()["torch"].entries[0].axes
    '(qkv N H) Dq'
    """
    from jaxmha.converters.layout.registry import LAYOUTS

    return {layout.name: layout for layout in LAYOUTS}


def positions_of(source: "str | os.PathLike[str]", *, length: int = 0) -> "dict[str, Positions]":
    """The positional encoding of every attention block of a published model, by block prefix.

    `source`: the folder of the model, with config.json, or a checkpoint in it. Apply `rotary` to
    the projected queries and keys, and pass `added.bias(T, S, query, key)` as the bias; see
    `jaxmha.converters.discovery.positions`. `length`: the longest sequence, on which the rope types
    `dynamic` and `longrope` depend, as in `rope_frequencies`; 0: up to the trained length.

    >>> positions_of("missing.safetensors")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxmha.checkpoint.errors.UnreadableFile: ...
    """
    from jaxmha.converters.discovery.all_positions import positions_of

    return positions_of(source, length=length)


def masks_of(source: "str | os.PathLike[str]") -> "dict[str, Attended]":
    """The keys that every attention block of a published model attends, by block prefix.

    `source`: the folder of the model, with config.json, or a checkpoint in it. Pass `mask(T, S)` as
    the mask, together with the padding of the input: `found[prefix].mask(T, S) & padding`.

    >>> masks_of("missing.safetensors")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxmha.checkpoint.errors.UnreadableFile: ...
    """
    from jaxmha.converters.discovery.all_positions import masks_of

    return masks_of(source)


def config_of(
    source: "str | os.PathLike[str]",
    *model_types: str,
    accepted: "Mapping[str, Sequence[Any]] | None" = None,
) -> dict[str, Any]:
    """The content of a model's config.json, if code that computes only some settings can use it.

    Args:
      source: the folder of the model, a checkpoint in it, or `hf://org/model[@revision]`.
      model_types: the values of `model_type` that the code computes.
      accepted: key -> the values of it that the code computes, wherever the key is in the file. A
        key that is missing or null is accepted: it has the default of its class.

    Raises:
      ValueError: another model type, or a value that is not accepted.
      CheckpointError: the file is missing or cannot be read.

    >>> config_of("missing", "bert")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxmha.checkpoint.errors.UnreadableFile: missing/config.json: there is no such file; ...
    """
    from pathlib import Path

    from jaxmha.converters.discovery import hf_config

    return hf_config.checked_config(Path(source), model_types, accepted or {})


def attribute(a: Any, b: Any, inputs: Any = None, **options: Any) -> "Attribution":
    """Attributes the difference between two attention layers to differing factors.

    See `jaxmha.converters.verify.attribution.attribute`. `inputs` are query `B T Dq`, key `B S Dk`,
    value `B S Dv` in this order, a mapping of these names (key defaults to query, value to key), or
    one array for all three; None draws random inputs.

    >>> import jax, jaxmha
    >>> params = jaxmha.init_params(jax.random.key(0), num_heads=2, features=6)
    >>> print(attribute(params, (params, jaxmha.Semantics(logits_soft_cap=0.1))).parts[0])
    soft cap: the logits are capped not in a, at 0.1 in b; 100 % of the difference
    """
    from jaxmha.converters.verify.attribution import attribute

    return attribute(a, b, inputs, **options)


def lint_masks(
    framework: str,
    *,
    batch_size: int | None = None,
    num_heads: int | None = None,
    query_length: int | None = None,
    key_length: int | None = None,
    dtype: object = None,
    **arguments: Any,
) -> "list[Finding]":
    """Lists the problems that mask arguments of one call seem to have, each with a remedy.

    Three kinds of correct masks give a finding, because they look like errors: left padding of
    every row (like inverted right padding); without `query_length`, queries that each see several
    keys more than the query before (like padding of a batch); and a triangle of the future (like
    a causal mask upside down). An empty list is no proof: `attribute` compares outputs.

    Args:
      framework: one of `jaxmha` (its functions and modules; a `mask` may be a `Mask`), `torch`
        (nn.MultiheadAttention), `sdpa`, `keras`, `flax`, `jax`, `huggingface`.
      batch_size, num_heads, query_length, key_length: B, N, T, S of the call; more known sizes
        allow more checks. Without `query_length`, the arrays determine T; a causal `Mask`
        without arrays of axis T counts as self-attention, `T = S`.
      dtype: compute dtype of the model, for any framework, if it differs from that of the mask.
      arguments: the framework's own, as `import_masks` takes them; other arguments of the call,
        such as `query` or `scale`, are accepted and ignored.

    Raises:
      ValueError: an unknown framework. TypeError: an argument that the call does not have.

    >>> import numpy as np
    >>> padding = np.array([[True, True, False], [True, True, True]])  # True = a token
    >>> for finding in lint_masks("torch", key_padding_mask=padding):
    ...     print(finding.name)
    inverted
    empty rows
    >>> print(*lint_masks("jax", mask=padding[::-1]))  # doctest: +ELLIPSIS
    mask: its first axis of 2 is read as T, and looks like the batch ... `mask[:, None, None, :]`.
    """
    from jaxmha.converters.masks.lint import findings

    sizes = {"B": batch_size, "N": num_heads, "T": query_length, "S": key_length}
    known = {letter: n for letter, n in sizes.items() if n is not None}
    return findings(framework, arguments, known, dtype)


def match(source: Any, target: Any, *, packing: "Packing" = "ask") -> "Plan":
    """The plan that fills a model from a source, with a question for each undecided layer.

    See `jaxmha.converters.matching.match`.

    >>> import numpy as np
    >>> plan = match({"fc.weight": np.zeros((3, 5))}, {"dense": {"kernel": np.zeros((5, 3))}})
    >>> plan.lines[0].sources, plan.lines[0].arrow
    (('fc.weight',), 'o0 i0 -> i0 o0')
    """
    from jaxmha.converters.matching import match

    return match(source, target, packing=packing)


def describe(
    params: "MHAParams | None" = None, semantics: "Semantics | None" = None, **sizes: Any
) -> "DataFlow":
    """The steps of attention with shapes and costs; see `jaxmha.introspect.graph_nodes.describe`.

    >>> describe(num_heads=8, features=512, query_len=10)["weights"].shape
    (1, 8, 10, 10)
    """
    from jaxmha import Semantics
    from jaxmha.introspect.graph_nodes import describe

    return describe(params, Semantics() if semantics is None else semantics, **sizes)


def plot_attention(
    weights: Any, tokens: Any = None, key_tokens: Any = None, **how: Any
) -> "Figure":
    """A heat map of every head; see `jaxmha.introspect.heatmaps.plot_attention`.

    >>> import numpy as np
    >>> figure = plot_attention(np.full((4, 3, 3), 1 / 3), ["a", "b", "c"])
    >>> len(figure.axes)  # four heads, and the scale of the colours
    5
    """
    from jaxmha.introspect.heatmaps import plot_attention

    return plot_attention(weights, tokens, key_tokens, **how)
