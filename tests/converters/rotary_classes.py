"""Rotary embeddings of transformers by model type, and configurations to compare them with."""

import copy
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MOST = {"max_position_embeddings": 256}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}  # fmt: skip
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_KINDS = {
    "full_attention": _LINEAR | {"rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 9e3},
}
_PLAIN = {"rope_type": "default", "rope_theta": 5e4}
# Name -> settings of a config.json.
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "base": {"rope_theta": 3e4},
    "older": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 3e4},
    "older without base": {"rope_scaling": _LINEAR},
    "bases of both": {"rope_scaling": _LINEAR | {"rope_theta": 7e3}, "rope_theta": 3e4},
    "newer": {"rope_parameters": _LINEAR | {"rope_theta": 5e4}, "rope_theta": 3e4},
    "newer without base": {"rope_parameters": _LINEAR},
    "both": {"rope_scaling": _LINEAR, "rope_parameters": _PLAIN},
    "both, with bases": {
        "rope_scaling": {"rope_type": "default", "rope_theta": 9e3},
        "rope_parameters": _LINEAR | {"rope_theta": 5e4}, "rope_theta": 3e4,
    },
    "both, one empty": {"rope_scaling": {}, "rope_parameters": _LINEAR | {"rope_theta": 5e4}},
    "yarn": {"rope_scaling": _YARN, **_MOST},
    "yarn, newer": {"rope_parameters": _YARN | {"rope_theta": 5e4}, **_MOST},
    "yarn, two lengths": {"rope_scaling": _YARN, "original_max_position_embeddings": 32, **_MOST},
    "llama3, two lengths":
        {"rope_scaling": _LLAMA3, "original_max_position_embeddings": 128, **_MOST},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}, **_MOST},
    "share": {"partial_rotary_factor": 0.5},
    "no share": {"partial_rotary_factor": None},
    "share, newer": {"rope_parameters": _PLAIN | {"partial_rotary_factor": 0.25}},
    "shares of both": {
        "rope_parameters": _PLAIN | {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5,
    },
    "share and scaling": {"rope_scaling": _LINEAR, "partial_rotary_factor": 0.5},
    "share of NeoX": {"rotary_pct": 0.5},
    "base of NeoX": {"rotary_emb_base": 3e4},
    "dims": {"rotary_dim": 8},
    "bases of kinds": {"rope_local_base_freq": 7e3, "global_rope_theta": 6e3, "local_rope_theta": 5e3},
    "proportional": {
        "rope_scaling": {"rope_type": "proportional"}, "partial_rotary_factor": 0.5,
        "rope_theta": 3e4,
    },
    "kinds": {"rope_parameters": _KINDS},
    "kinds and scaling": {"rope_parameters": _KINDS, "rope_scaling": _LINEAR},
    "mrope": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 3e4},
    "su": {
        "rope_scaling": {"type": "su", "short_factor": [1.5] * 48, "long_factor": [2.5] * 48,
                         "original_max_position_embeddings": 64},
        "original_max_position_embeddings": 64, **_MOST,
    },
    "longrope, length of the class": {
        "rope_scaling": {
            "rope_type": "longrope", "short_factor": [1.5] * 48, "long_factor": [2.5] * 48,
            "original_max_position_embeddings": 64,
        },
        **_MOST,
    },
}  # fmt: skip


def packages() -> list[str]:
    """The packages of `transformers.models` whose models have rotary frequencies of token indices."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    files = sorted(root.glob("*/modeling_*.py"))
    return [file.parent.name for file in files if "ROPE_INIT_FUNCTIONS" in file.read_text()]


def rotary_of(package: str) -> Iterator[tuple[Any, Any]]:
    """Yields every configuration class of a package, with the class of its rotary embedding.

    Skips a rotary embedding that is annotated with a configuration of several parts, unless only
    one of them has rotary parameters.
    """
    name = f"transformers.models.{package}"
    modeling = importlib.import_module(f"{name}.modeling_{package}")
    config = importlib.import_module(f"{name}.configuration_{package}")
    kinds = [x for x in vars(config).values() if getattr(x, "__module__", "") == config.__name__]
    keys = {"rope_parameters", "rope_theta"}
    kinds = [x for x in kinds if keys & getattr(x, "__dataclass_fields__", {}).keys()]
    for found in list(vars(modeling).values()):
        if not (inspect.isclass(found) and found.__module__ == modeling.__name__):
            continue
        if "Rotary" in found.__name__ and "ROPE_INIT" in inspect.getsource(found):
            annotated = inspect.signature(found.__init__).parameters["config"].annotation
            stated = [x for x in kinds if x is annotated]
            if stated or len(kinds) == 1:
                yield (stated or kinds)[0], found


def computed(kind: Any, rotary: Any, settings: dict[str, Any], layer: int) -> Any:
    """Width of heads, frequencies and factor of a layer; None if the class refuses the settings."""
    try:
        config = kind.from_dict(copy.deepcopy(settings))
        module = rotary(config)
        listed = getattr(config, "layer_types", None) or [""] * (layer + 1)
        name = f"{listed[layer]}_" if hasattr(module, f"{listed[layer]}_inv_freq") else ""
        frequencies = getattr(module, f"{name}inv_freq").numpy()
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
    except Exception:  # noqa: BLE001 (classes raise various errors)
        return None
    most = getattr(config, "max_position_embeddings", 0)
    return width, most, frequencies, getattr(module, f"{name}attention_scaling", 1.0)
