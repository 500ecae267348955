"""Groups of Keras layers in a .weights.h5 file, also for files converted from one."""

from collections.abc import Mapping

from jaxmha.checkpoint import json_text
from jaxmha.checkpoint.errors import BudgetExceeded
from jaxmha.checkpoint.limits import Budget, Limits

# Key of safetensors metadata: prefix of a layer -> its group in a .weights.h5 file, and its name.
METADATA = "jaxmha.keras.groups"


def from_metadata(metadata: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Group and name of every layer by prefix, from the metadata of a converted file.

    Raises:
      BudgetExceeded: the text takes too much memory.
    """
    raw = metadata.get(METADATA, "{}").encode("utf-8", "replace")
    try:
        found = json_text.load(raw, Budget(METADATA, len(raw), Limits()))
    except BudgetExceeded:
        raise
    except (ValueError, RecursionError):
        return {}
    return {
        prefix: (own[0], own[1])
        for prefix, own in (found.items() if isinstance(found, dict) else ())
        if isinstance(own, list) and len(own) == 2 and all(isinstance(x, str) for x in own)
    }


def names(held: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, str]:
    """The user's names of layers by group: `held` by a Keras file, or by the metadata of its copy."""
    copied = from_metadata(metadata).items()
    return {**held} or {
        prefix: name for prefix, (group, name) in copied if name and prefix == group
    }


def of(names: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Group and name of every layer by prefix, from a Keras file (`names`) or else from metadata."""
    return {group: (group, name) for group, name in names.items()} or from_metadata(metadata)
