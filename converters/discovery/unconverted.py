"""Finds parts (`signs.PARTS`) of a model's attention that its conversion would leave out.

Sources: keys of config.json, tensors outside the blocks, the table of model types
(`architectures`).
"""

import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from jaxmha.checkpoint.errors import listed, printable
from jaxmha.converters.discovery import (
    architectures,
    class_defaults,
    hf_config,
    masked_types,
    signs,
    unlike,
)
from jaxmha.converters.discovery.hf_config import Json

_ROTARY = signs.SIGNS[0]
_LONGEST_KEY = 100  # longer keys are ignored: no real setting has such a name
_SHORT = reprlib.Repr()
_SHORT.maxdict = _SHORT.maxlist = 3


class Evidence(NamedTuple):
    """Evidence from keys of config.json.

    `present`: part -> keys and values that imply it. `off`: parts that a key switches off.
    `unknown`: keys that could imply a part not in the table.
    """

    present: dict[str, list[str]]
    off: set[str]
    unknown: list[str]


def notes(
    path: Path,
    names: Iterable[str],
    layouts: Collection[str],
    carried: Collection[str] = (),
) -> tuple[str, ...]:
    """Notes on the parts around the blocks of a checkpoint that are not converted.

    `names` are all tensors outside the blocks, `layouts` the layouts of the blocks; `path` is the
    file, and its folder may hold a config.json. `carried`: keys of `signs.PARTS` (such as a soft
    cap) that the semantics of the blocks express; they have no note.
    """
    return tuple(printable(note) for note in _notes(path, names, layouts, carried))


def refuse(
    path: Path, names: Iterable[str], layouts: Collection[str], carried: Collection[str] = ()
) -> None:
    """Raises ValueError if a model's attention computes a function that its layouts cannot express.

    `path`: the checkpoint. `names`: all tensors outside the blocks. `layouts`: the layouts of the
    blocks; if it is empty, nothing raises. `carried`: keys of `signs.PARTS` (such as a soft cap)
    that the semantics of the blocks express; they do not raise.
    """
    content = _content(path)
    evidence = _evidence(content)
    refused = {part: evidence.present[part] for part in ("form",) if part in evidence.present}
    refused |= _by_type(content, evidence, architectures.functions)
    where = f"{path.parent / hf_config.CONFIG}: "
    if not hf_config.types_in(content):
        where = f"{path}: " if not refused else where
        refused |= _by_names(names, architectures.functions)
    refused = {part: texts for part, texts in refused.items() if part not in carried}
    for part, texts in refused.items() if layouts else ():
        text, remedy = signs.PARTS[part]
        # The model type, if a type is the evidence; `form` returns "" for any other word.
        model_type = texts[0].rstrip(")").rpartition(" ")[2]
        does = f"{why}, and so has" if (why := unlike.form(model_type)) else "has"
        raise ValueError(
            printable(
                f"{where}{texts[0]} {does} {text}: a file of another layout would be read as another "
                f"function; {remedy}"
            )
        )


def _notes(
    path: Path, names: Iterable[str], layouts: Collection[str], carried: Collection[str]
) -> Iterator[str]:
    content = _content(path)
    evidence = _evidence(content)
    parts = {part: list(texts) for part, texts in evidence.present.items()}
    types = hf_config.types_in(content)
    names = list(names)
    by_type = [
        _by_type(content, evidence, has) for has in (architectures.parts, architectures.functions)
    ]
    if not types:
        by_type += [_by_names(names, has) for has in (architectures.parts, architectures.functions)]
    for found in (_by_tensor(names), *by_type):
        for part, texts in found.items():
            parts.setdefault(part, []).extend(texts)
    for part, (text, remedy) in signs.PARTS.items():
        if part in parts and part not in carried:
            yield f"not converted: {text}, by {listed(parts[part], 6)}; {remedy}"
    for model_type in types:
        if model_type not in architectures.KNOWN:
            yield (
                f"jaxmha does not know what {model_type} (model_type of config.json) computes "
                "around its projections (positions, scale, masks): "
                "compare with the model's own output"
            )
    if evidence.unknown:
        yield (
            f"config.json: not known here, and may change attention: {listed(evidence.unknown)}: "
            "compare with the model's own output"
        )
    implied = [] if types or {"rotary", "alibi"} & parts.keys() else signs.IMPLIED.keys() & layouts
    for layout in implied:
        yield (
            "no config.json names the model_type: models with blocks of layout "
            f"{layout} mostly have {signs.IMPLIED[layout]}, which are not converted"
        )
    if types or implied or not set(layouts) - signs.CLASSES:
        return
    keys = {*signs.OF_TRANSFORMERS, "pretrained_cfg"}  # timm writes pretrained_cfg
    of_model = isinstance(content, dict) and keys & content.keys()
    if of_model or content == {}:
        known = (path.parent / hf_config.CONFIG).exists()
        lacking = "config.json names no model_type" if known else "there is no config.json"
        yield (
            f"{lacking}: the model may compute more around its projections (positions, biases of the "
            "logits, scale, windows): put the model's own config.json next to the file, or compare "
            "with the model's own output"
        )


def _content(path: Path) -> Json:
    try:
        return hf_config.read(path)
    except (ValueError, RecursionError):  # `described.of` reports the unreadable file
        return None


def _evidence(content: Json) -> Evidence:
    """Collects the evidence for parts in all keys of a configuration."""
    evidence = Evidence({}, set(), [])
    for way, own in settings(content):
        within = any(_sign(step) is _ROTARY for step in way)
        whole = class_defaults.filled(own, str(own.get("model_type")))
        switched = {part for part, key in signs.SWITCHES.items() if whole.get(key) is False}
        evidence.off.update(switched)
        for key, value in own.items():
            stray = key == "sliding_window" and masked_types.ignores_window(own)
            if stray or len(key) > _LONGEST_KEY:
                continue
            shown = f"{': '.join((*way, key))} = {_SHORT.repr(value)}"
            tables = [text for keys, text in signs.VALUE_SIGNS.items() if re.fullmatch(keys, key)]
            for text in tables:
                _by_value(text, value, shown, evidence)
            if tables:
                continue
            if (sign := _sign(key)) is not None:
                if not (within and sign is _ROTARY) and sign.part not in switched:
                    _by_sign(sign, value, shown, evidence)
            elif not (within or _empty(value) or isinstance(value, dict)) and _suspect(key):
                evidence.unknown.append(shown)
    return evidence


@lru_cache(4096)
def _sign(key: str) -> signs.Sign | None:
    return next((sign for sign in signs.SIGNS if re.fullmatch(sign.keys, key)), None)


def concerns_attention(way: Sequence[str]) -> bool:
    """True if the keys that lead to a setting show that it may change attention.

    >>> concerns_attention(["text_config", "rope_theta"]), concerns_attention(["hidden_act"])
    (True, False)
    """
    keys = [key for key in way if len(key) <= _LONGEST_KEY]
    by_value = any(re.fullmatch(pattern, key) for pattern in signs.VALUE_SIGNS for key in keys)
    return by_value or any(_sign(key) is not None or _suspect(key) for key in keys)


def _suspect(key: str) -> bool:
    return bool(re.search(signs.SUSPECT, key)) and not re.search(signs.ELSEWHERE, key)


def _by_value(
    table: Iterable[tuple[str, str]], value: Json, shown: str, evidence: Evidence
) -> None:
    """Adds the evidence of a key whose value names kinds of layers or of positions."""
    text = " ".join(_strings(value)).lower()
    for part, pattern in table:
        if re.search(pattern, text):
            evidence.present.setdefault(part, []).append(f"config.json: {shown}")
        elif text:
            evidence.off.add(part)


def _by_sign(sign: signs.Sign, value: Json, shown: str, evidence: Evidence) -> None:
    """Adds the evidence of a key whose name implies `sign.part`; its value may switch that off."""
    off = value in sign.off if sign.off else _empty(value)
    if off or value is None:
        if sign.decides:
            evidence.off.add(sign.part)
    else:
        evidence.present.setdefault(sign.part, []).append(f"config.json: {shown}")


def settings(content: Json) -> Iterator[tuple[tuple[str, ...], dict[str, Json]]]:
    """Yields every dictionary in a configuration, with the keys that lead to it.

    Dictionaries that do not concern the model (`signs.NOT_OF_MODELS`) are left out.
    """
    todo: list[tuple[tuple[str, ...], Json]] = [((), content)]
    while todo:
        way, value = todo.pop()
        if isinstance(value, list):
            todo += [(way, item) for item in reversed(value)]
        elif isinstance(value, dict):
            yield way, value
            keys = [key for key in value if key not in signs.NOT_OF_MODELS]
            todo += [((*way, key), value[key]) for key in reversed(keys)]


def _strings(value: Json) -> Iterator[str]:
    """The strings in a value, also in nested lists, such as `attention_types` of GPT-Neo."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value[:1000]:
            yield from _strings(item)


def _empty(value: Json) -> bool:
    if isinstance(value, list | dict):
        return not value
    return any(
        value is none or (type(value) is type(none) and value == none) for none in signs.NOTHING
    )


def _by_type(
    content: Json, evidence: Evidence, has: Callable[[str], Iterable[str]]
) -> dict[str, list[str]]:
    """The parts of the model types in a configuration, without parts that its keys switch off.

    `has` returns the parts of a model type.
    """
    parts: dict[str, list[str]] = {}
    for model_type in hf_config.types_in(content):
        for part in has(model_type):
            if part not in evidence.off or part in evidence.present:
                parts.setdefault(part, []).append(f"model_type {model_type}")
    return parts


def _by_names(names: Iterable[str], has: Callable[[str], Iterable[str]]) -> dict[str, list[str]]:
    """The parts of the model types that tensor names reveal.

    A name reveals a model type if its first component is that type, or if only that type has such a
    name. `has` returns the parts of a model type.
    """
    parts: dict[str, list[str]] = {}
    first_names: dict[str, str] = {}
    for name in names:
        first = re.split("[./]", name, maxsplit=1)[0]
        own = [kind for kind, pattern in signs.OF_TYPE if re.search(pattern, name[-300:])]
        for model_type in (first, *own):
            if model_type in architectures.KNOWN:
                first_names.setdefault(model_type, name)
    for model_type, name in first_names.items():
        for part in has(model_type):
            parts.setdefault(part, []).append(f"tensor {name} (a name of {model_type})")
    return parts


def _by_tensor(names: Iterable[str]) -> dict[str, list[str]]:
    """The parts that tensors outside the blocks reveal, each with a text naming the tensors."""
    counts: dict[str, list[str]] = {}
    for name in names:
        for part, pattern in signs.TENSORS:
            if re.search(pattern, name.replace("/", ".")[-300:]):
                counts.setdefault(part, []).append(name)
    return {
        part: [f"tensor {of[0]}" + f" and {len(of) - 1} more" * (len(of) > 1)]
        for part, of in counts.items()
    }
