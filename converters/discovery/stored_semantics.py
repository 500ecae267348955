"""Writes semantics of attention blocks, which no array holds, to file metadata, and reads them."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace

from jaxmha import Semantics
from jaxmha.checkpoint import json_text
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.other_behaviours import Values
from jaxmha.converters.layout.base import Layout

# Key of metadata, followed by `.PREFIX`: the semantics of a converted block, and the layout from which
# it was converted.
METADATA = "jaxmha.semantics"
_LIMITS = Limits(memory=1 << 20)
_FROM = "from"


def described(block: Block, metadata: Mapping[str, str]) -> Block:
    """The block, with the semantics that metadata keeps for it; unchanged if there are none."""
    values = _stored(block, metadata)
    if not values:
        return block
    return _with(block, {k: v for k, v in values.items() if k != _FROM})


def _stored(block: Block, metadata: Mapping[str, str]) -> Values:
    """The semantics that metadata keeps for a block; empty if there are none.

    Raises CheckpointError (a ValueError) if the text is not a JSON object, or too large.
    """
    key = f"{METADATA}.{block.prefix}"
    raw = metadata.get(key, "").encode("utf-8", "replace")
    if not raw:
        return {}
    remedy = "convert the original file again"
    return json_text.parse(raw, Budget(key, len(raw), _LIMITS), remedy, numbers=True)


def _with(block: Block, values: Values) -> Block:
    try:
        semantics = Semantics(**values)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{METADATA}.{block.prefix} of the metadata: {error}") from error
    return block._replace(layout=replace(block.layout, semantics=semantics), configured=True)


def to_metadata(
    blocks: Mapping[str, Block], to: Layout, metadata: Mapping[str, str]
) -> dict[str, str]:
    """Metadata of the destination for the semantics of blocks, by their prefix there.

    A layout other than jaxmha implies the semantics, so it has metadata only for blocks whose
    semantics a configuration set: at the destination, the configuration may be absent, or have a
    scale that is already folded into the arrays.

    `to`: layout of the destination. `metadata`: the metadata of the source.
    """
    found = {}
    for prefix, block in blocks.items():
        if to.name != "jaxmha" and not block.configured:
            continue
        own = {name: getattr(block.layout.semantics, name) for name in to.holds}
        semantics = replace(target(to, block, metadata).semantics, **own)
        values = {f.name: getattr(semantics, f.name) for f in fields(Semantics)}
        default = Semantics()
        kept = {k: v for k, v in values.items() if v != getattr(default, k)}
        found[f"{METADATA}.{prefix}"] = json.dumps(kept | {_FROM: block.layout.name})
    return found


def origin(block: Block, metadata: Mapping[str, str]) -> str:
    """The layout from which a block of layout jaxmha was converted; "" if that is not known."""
    return str(_stored(block, metadata).get(_FROM, "")) if block.layout.name == "jaxmha" else ""


def target(to: Layout, block: Block, metadata: Mapping[str, str]) -> Layout:
    """The destination layout `to`, with the semantics that a block has in it.

    These are the block's own if `to` is jaxmha, or the layout from which the block was converted;
    otherwise `to` keeps its semantics.
    """
    if origin(block, metadata) == to.name:
        return replace(to, semantics=block.layout.semantics)
    return replace(to, semantics=block.layout.semantics) if to.name == "jaxmha" else to
