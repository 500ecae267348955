"""Groups of Keras layers in a .weights.h5 file, also for files converted from one."""

import json
from collections.abc import Mapping

# Key of safetensors metadata: prefix of a layer -> its group in a .weights.h5 file, and its name.
METADATA = "jaxmha.keras.groups"


def from_metadata(metadata: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Group and name of every layer by prefix, from the metadata of a converted file."""
    try:
        found = json.loads(metadata.get(METADATA, "{}"))
    except (ValueError, RecursionError):
        return {}
    return {
        prefix: (own[0], own[1])
        for prefix, own in (found.items() if isinstance(found, dict) else ())
        if isinstance(own, list) and len(own) == 2 and all(isinstance(x, str) for x in own)
    }


def of(names: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Group and name of every layer by prefix, from a Keras file (`names`) or else from metadata."""
    return {group: (group, name) for group, name in names.items()} or from_metadata(metadata)
