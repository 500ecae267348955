"""Metadata as the bytes of an extra field of a zip member: compressed JSON, with its checksum."""

import json
import zlib
from collections.abc import Mapping

from jaxmha.checkpoint import json_text
from jaxmha.checkpoint.errors import IntegrityError, UnsupportedFormat
from jaxmha.checkpoint.limits import Budget
from jaxmha.checkpoint.plan import WriteJob

MOST = 60_000  # bytes of the field; all extra fields of a member have at most 65,535
_MOST_TEXT = 1 << 22
_AGAIN = "copy the file again from where it was written"


def packed(metadata: Mapping[str, str]) -> bytes:
    """The bytes for metadata; empty for none."""
    return zlib.compress(json.dumps(dict(metadata)).encode(), 9) if metadata else b""


def check(plan: WriteJob) -> None:
    """Raises UnsupportedFormat if the metadata is too large, or no tensor exists to keep it."""
    if not plan.metadata:
        return
    if not plan.info:
        raise UnsupportedFormat(plan.path, "metadata has no place without tensors", "leave it out")
    size = len(packed(plan.metadata))
    if size > MOST or sum(len(k) + len(v) for k, v in plan.metadata.items()) > _MOST_TEXT // 8:
        problem = f"{size} bytes of metadata are too many for a zip file"
        raise UnsupportedFormat(plan.path, problem, "leave it out, or write .safetensors")


def unpacked(raw: bytes, budget: Budget) -> dict[str, str]:
    """The metadata in these bytes.

    Raises:
        IntegrityError: the bytes are damaged.
    """
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(raw, _MOST_TEXT)
    except zlib.error:
        text = b""
    if not inflate.eof or inflate.unused_data:
        raise IntegrityError(budget.path, "the metadata is damaged", _AGAIN)
    found = json_text.parse(text, budget, _AGAIN)
    if any(type(value) is not str for value in found.values()):
        raise IntegrityError(budget.path, "the metadata has a value that is no text", _AGAIN)
    return found
