"""The groups of Keras layers in a .weights.h5 file, of such files and of what was converted from one."""

import json
from collections.abc import Mapping

# Key of safetensors metadata: prefix of every layer -> its group in a .weights.h5 file, its name.
METADATA = "jaxmha.keras.groups"


def told(metadata: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Group and name of every layer by its prefix, as the metadata of a converted file has them."""
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
    """Group and name of every layer by its prefix: a file of Keras has its groups as prefixes."""
    return {group: (group, name) for group, name in names.items()} or told(metadata)
