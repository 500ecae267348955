"""Makes the table of `jaxmha.converters.discovery.model_types`: families of blocks by model type.

    python -m tests.model_types [TYPE ...] [--write]

Every type that transformers can build from its default configuration is built without memory (torch's
meta device). Names in memory and names on disk both count: transformers renames many models when it
saves them, and files of older versions have the names on disk. All types take some five minutes; one
that takes more than a minute alone keeps its rows.
"""

import argparse
import signal
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxmha.converters.discovery import attention_blocks, model_families, model_types

_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText")
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip
_MOST = 8
_LIMIT = 60  # seconds for one type


class LateError(BaseException):
    """A type takes too long; no Exception, of which a class of a model may raise any."""


def found(model_type: str) -> set[str] | None:
    """The families of the blocks of a type, in memory or on disk; None: it cannot be built."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    config = _config(model_type)
    for name in _CLASSES if config is not None else ():
        try:
            with torch.device("meta"):
                model = getattr(transformers, name).from_config(config)
        except Exception:  # noqa: BLE001, S112 (whatever its defaults do not have)
            continue
        state = model.state_dict()
        names = _families(state)
        try:
            return names | _families(revert_weight_conversion(model, state))
        except Exception:  # noqa: BLE001 (a conversion that computes on arrays)
            return names
    return None


def kept(model_type: str) -> set[str]:
    """The families of a type in the table as it is."""
    return {f for f, types in model_types.MODEL_TYPES.items() if model_type in types.split()}


def table(types: Iterable[str]) -> dict[str, set[str]]:
    """Family -> its types, of those that can be built. Progress goes to stderr."""
    made: dict[str, set[str]] = {family.name: set() for family in model_families.FAMILIES}
    for model_type in types:
        start = time.perf_counter()
        try:
            with _limited(_LIMIT):
                names, line = found(model_type), ""
        except LateError:
            names, line = kept(model_type), f"more than {_LIMIT} s: its rows are kept"
        line = line or ("cannot be built" if names is None else ", ".join(sorted(names)))
        seconds = time.perf_counter() - start
        print(f"{model_type} ({seconds:.1f} s): {line}", file=sys.stderr, flush=True)
        for family in names or ():
            made[family].add(model_type)
    return {family: types for family, types in made.items() if types}


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def text(made: dict[str, set[str]]) -> str:
    """The module, formatted as it is kept."""
    rows = []
    for family, types in made.items():
        line = f'    "{family}": "{" ".join(sorted(types))}",'
        if len(line) > 100:
            parts = textwrap.wrap(" ".join(sorted(types)), 86, break_on_hyphens=False)
            shown = [f'        "{part} "' for part in parts[:-1]] + [f'        "{parts[-1]}"']
            line = "\n".join((f'    "{family}": (', *shown, "    ),"))
        rows.append(line)
    head = Path(model_types.__file__).read_text().partition("MODEL_TYPES")[0]
    return f"{head}MODEL_TYPES: dict[str, str] = {{\n" + "\n".join(rows) + "\n}\n"


def _config(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[model_type]()
        data = config.to_dict()
        if "layer_types" in data or not any(data.get(key, 0) for key in _LAYERS):
            return config
        few = {key: min(data[key], _MOST) for key in _LAYERS if isinstance(data.get(key), int)}
        return type(config)(**few)
    except Exception:  # noqa: BLE001 (sizes that only a checkpoint tells)
        return None


def _families(state: dict[str, Any]) -> set[str]:
    shapes = {name: tuple(array.shape) for name, array in state.items()}
    try:
        found = attention_blocks.find(shapes)
    except ValueError:  # two layouts, neither of which has all arrays of these names
        return set()
    return {name for block in found for name in _of_block(block, shapes)}


def _of_block(block: attention_blocks.Block, shapes: dict[str, tuple[int, ...]]) -> set[str]:
    """The families of a block; of one with norms, sinks or gates, those with its layers alone."""
    if block.family:
        return {block.family[0]}
    made: dict[str, str] = {}
    for family in model_families.FAMILIES:
        kernels = {e.key for e in attention_blocks.named(family.layout).entries if not e.group}
        stands = model_families.stands([family.name], block.prefix)
        if stands and kernels <= block.keys.keys() and family.recognises(block.prefix, shapes):
            made.setdefault(family.layout, family.name)
    return {*made.values()}


def main() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="default: all")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    made = table(given.types or sorted(CONFIG_MAPPING_NAMES))
    if given.write and not given.types:
        Path(model_types.__file__).write_text(text(made))
        return
    for family, types in made.items():
        before = set(model_types.MODEL_TYPES.get(family, "").split())
        print(f"{family}: {' '.join(sorted(types))}; new: {' '.join(sorted(types - before))}")


if __name__ == "__main__":
    main()
