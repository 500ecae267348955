"""Reads which pairs of query and key an attention block attends, from config.json.

`masks_of` returns, for every block, the mask that a call of the block needs besides the padding of
its input.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmha import Mask, checkpoint
from jaxmha.checkpoint.errors import printable
from jaxmha.converters.discovery import (
    architectures,
    behaviours,
    described,
    hf_config,
    layer_kinds,
    masked_types,
    positions,
)
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.head_count import Configured
from jaxmha.converters.discovery.notes import counted
from jaxmha.converters.masks.aligned import aligned_window

_NOT_KNOWN = "is not known here"
# Kinds of layers whose masks follow from positions, in the words of `layer_types` and of GPT-Neo's
# `attention_types`. A hybrid layer has a state next to its attention. A layer of window_attention gets
# the windows of an image as sequences of their own. The masks of all other kinds are unknown: an
# indexer chooses the keys, for example, or the layer has no softmax.
_WHOLE = frozenset(["full_attention", "attention", "global", "hybrid", "window_attention"])
_SLIDING = frozenset(["sliding_attention", "sliding", "local", "hybrid_sliding"])
_CHUNKED = frozenset(["chunked_attention", "chunked"])


class Attended(NamedTuple):
    """The pairs of query and key that a block attends, without padding.

    `scheme` is "full", "causal", "windows" or "unknown". A query attends keys from `left` positions
    before it to `right` positions after it (None: all), in its own chunk of `chunk` tokens (None: no
    chunks). "windows": the tokens are patches in square windows of an image that was rolled by
    `shift` patches (Swin); see `of_windows`. `why` is the reason for "unknown".
    """

    scheme: str
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    shift: int = 0
    why: str = ""

    def mask(self, T: int, S: int) -> Mask:
        """The mask of T queries and S keys; the last query has the position of the last key.

        >>> Attended("causal", left=1).mask(3, 3).to_array(3, 3).astype(int).tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]]

        Raises:
          ValueError: the scheme is "unknown" or "windows".
        """
        if self.scheme == "unknown":
            raise ValueError(f"the mask of this block is not known ({self.why}): give it as mask=")
        if self.scheme == "windows":
            raise ValueError("the mask of windows needs their rows and columns: use of_windows")
        found = Mask.causal(S - T) if self.scheme == "causal" else Mask()
        found &= aligned_window(self.left, self.right, T, S)
        if self.chunk is not None:
            keys = np.arange(S)[None] // self.chunk
            found &= Mask.segments(query_ids=keys[:, S - T :], key_value_ids=keys)
        return found

    def of_windows(self, rows: int, columns: int, side: int, always: bool = False) -> Mask:
        """The mask of the windows of one image in order, `(windows, 1, T, T)`, of T = side ** 2 tokens.

        Tokens from opposite sides of the image do not attend each other.
        `rows` and `columns` count windows. An image of one row or column of windows is not rolled,
        unless `always` is true (backbones of detectors, which set `always_partition`).

        >>> mask = Attended("windows", shift=1).of_windows(2, 2, 2)
        >>> mask.array.sum((1, 2, 3)).tolist()
        [16, 8, 8, 4]
        """
        shift = self.shift if always or min(rows, columns) > 1 else 0
        parts = [
            (np.arange(n * side) >= n * side - side).astype(int)
            + (shift > 0) * (np.arange(n * side) >= n * side - shift)
            for n in (rows, columns)
        ]
        if not shift:
            parts = [np.zeros_like(part) for part in parts]
        regions = parts[0][:, None] * 3 + parts[1]
        regions = regions.reshape(rows, side, columns, side).swapaxes(1, 2)
        regions = regions.reshape(rows * columns, side * side)
        return Mask.dense((regions[:, :, None] == regions[:, None])[:, None])

    def __str__(self) -> str:
        """The mask in words."""
        if self.scheme == "windows":
            return f"windows of an image rolled by {self.shift}" if self.shift else "windows"
        if self.scheme == "unknown":
            return f"unknown, {self.why}"
        if self.left is not None:
            after = "" if self.scheme == "causal" else f" and {self.right} after"
            return f"{self.scheme}, a query and {self.left} keys before{after}"
        return self.scheme + f", in chunks of {self.chunk} tokens" * (self.chunk is not None)


def of_prefixes(
    file: checkpoint.Checkpoint,
    blocks: Sequence[Block],
    prefixes: Sequence[str],
    heads: Configured | None = None,
) -> dict[str, Attended]:
    """The masks of blocks of an open checkpoint, by prefix.

    `prefixes`: the blocks to return, which may be of latent attention. `heads`: the head counts of
    the configuration; None: they are read, and compared with `blocks`, all blocks of the file.
    """
    content = hf_config.readable(file.path)
    if heads is None and positions.typed(file):
        heads = described.of(file, blocks).heads
    return {prefix: _of_block(prefix, content, heads) for prefix in prefixes}


def notes(found: Mapping[str, Attended]) -> Iterator[str]:
    """Yields a note on every mask that is neither full nor causal nor of windows of an image.

    There is no note on blocks of unknown model types either.
    """
    masks: dict[str, list[str]] = {}
    for prefix, one in found.items():
        if (
            str(one) not in ("full", "causal")
            and one.scheme != "windows"
            and not one.why.endswith(_NOT_KNOWN)
        ):
            masks.setdefault(str(one), []).append(prefix)
    for mask, prefixes in masks.items():
        given = "; masks_of(folder) of jaxmha.converters gives it" * ("unknown" not in mask)
        yield printable(f"mask of {counted(prefixes)}: {mask}{given}")


def notes_with_positions(
    file: checkpoint.Checkpoint, blocks: Sequence[Block], heads: Configured | None
) -> Iterator[str]:
    """Yields the notes on the positions and on the masks of blocks of an open checkpoint.

    `heads`: the head counts of its configuration.
    """
    yield from positions.notes(file, positions.of_blocks(file, blocks, heads))
    yield from notes(of_prefixes(file, blocks, [block.prefix for block in blocks], heads))


def _of_block(prefix: str, content: Any, configured: Configured | None) -> Attended:
    count = configured.part_of(prefix) if configured else None
    own, model_type = behaviours.part_of(content, count, prefix) or behaviours.part(content, ())
    if not model_type or model_type not in architectures.KNOWN:
        return Attended("unknown", why=f"model_type {model_type or '(none)'} {_NOT_KNOWN}")
    if (why := masked_types.why_unknown(content, model_type, prefix)) is not None:
        return Attended("unknown", why=why)
    if re.search(masked_types.ACROSS, prefix):
        return Attended("full")
    causal = masked_types.is_causal(model_type, prefix, own)
    try:
        if model_type in masked_types.ROLLED:
            odd = int(re.findall(r"\d+", prefix)[-1]) % 2
            return Attended("windows", shift=odd * (_size(own, "window_size") // 2))
        return _windowed(own, model_type, behaviours.layer_of(prefix), causal)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return Attended("unknown", why=f"{model_type}: {error}")


def _windowed(own: Mapping[str, Any], model_type: str, layer: int | None, causal: bool) -> Attended:
    """The mask of a layer by the settings of its windows and chunks.

    Raises ValueError if no mask is known for its kind of layer, or a setting is not a size.
    """
    scheme = "causal" if causal else "full"
    kind = _kind(own, model_type, layer)
    if kind in _WHOLE:
        return Attended(scheme)
    if kind in _CHUNKED:
        return Attended(scheme, chunk=_size(own, "attention_chunk_size", model_type))
    if kind not in _SLIDING:
        raise ValueError(masked_types.OF_KINDS.get(kind, f"no mask is read for layers of {kind}"))
    key, divisor = ("sliding_window", 1)
    if model_type in masked_types.WINDOWS and own.get("sliding_window") is None:
        key, divisor = masked_types.WINDOWS[model_type]
    size = _size(own, key, model_type) // divisor
    if causal:
        return Attended(scheme, size - 1)
    return Attended(scheme, *masked_types.BOTH_WAYS.get(model_type, _each)(size))


def _each(size: int) -> tuple[int, int]:
    """`left` and `right` of a window whose size counts the keys on each side of the query."""
    return size, size


def _kind(own: Mapping[str, Any], model_type: str, layer: int | None) -> str:
    """The kind of attention of a layer, in the words of `layer_types`."""
    off = layer_kinds.switched_off(own, model_type)
    if (found := layer_kinds.listed(own, model_type, layer)) is not None:
        if found in _SLIDING and off:
            raise ValueError(f"layer_types has {found}, and use_sliding_window is not true")
        return found
    if model_type == "recurrent_gemma":
        return "sliding_attention"
    window = not off and layer_kinds.window(own, model_type) is not None
    if found := layer_kinds.by_rule(own, model_type, layer):
        every = layer_kinds.EVERY.get(model_type)
        unset = not window and (every is None or every.optional)
        return "full_attention" if unset and found == "sliding_attention" else found
    if model_type in layer_kinds.AFTER and window and layer is not None:
        last = own.get("max_window_layers")
        if type(last) is not int:
            raise ValueError(f"max_window_layers must be an integer, got {last!r}")
        return "sliding_attention" if layer >= last else "full_attention"
    sliding = window and model_type in masked_types.TYPES["sliding"]
    return "sliding_attention" if sliding else "full_attention"


def _size(own: Mapping[str, Any], key: str, model_type: str = "") -> int:
    """The size of a window or chunk; without the key, the default of the model type."""
    size = own.get(key, layer_kinds.default_window(own, model_type))
    if type(size) is not int or size < 1:
        raise ValueError(f"{key} must be a positive integer, got {size!r}")
    return size
