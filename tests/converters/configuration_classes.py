"""Configuration classes of transformers by model type, also of parts of models."""

import sys
from collections.abc import Iterable
from typing import Any

# Parts whose model type does not begin as that of the model: the model type of the model.
_OUTER = {"t5_gemma_module": "t5gemma", "voxtral_realtime_encoder": "voxtral_realtime"}


def classes_of(model_types: Iterable[str]) -> dict[str, Any]:
    """The class of each model type."""
    from transformers import CONFIG_MAPPING

    found = {}
    for name in model_types:
        outer = _OUTER.get(name, name)
        while outer not in CONFIG_MAPPING:
            outer = outer.rpartition("_")[0]
        module = sys.modules[CONFIG_MAPPING[outer].__module__]
        found[name] = next(
            x for x in vars(module).values() if getattr(x, "model_type", None) == name
        )
    return found
