"""Reads facts that no tensor holds from the config.json next to a checkpoint."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from jaxmha.checkpoint import hub, json_text, yaml_text
from jaxmha.checkpoint.errors import (
    BudgetExceeded,
    MissingDependency,
    UnreadableFile,
    printable,
    shown,
)
from jaxmha.checkpoint.inside import open_folder, open_inside
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.converters.discovery import other_configs, part_types

if TYPE_CHECKING:
    Json: TypeAlias = Mapping[str, "Json"] | Sequence["Json"] | str | int | float | None
else:
    Json = object  # runtime checkers do not know recursive types

CONFIG = "config.json"
# Configurations of litgpt, which are read if there is no config.json.
OTHERS = ("model_config.yaml", "lit_config.json")
_KINDS = {".json": "JSON", ".yaml": "YAML"}
_LIMITS = Limits(memory=8 << 20)  # about 30,000 entries; searching them takes 0.1 s
_MOST_FOUND = 1000
# Contents by folder, during `read_once`.
_contents: ContextVar[dict[Path, Json] | None] = ContextVar("_contents", default=None)

# Settings that change attention, and the value of each that leaves attention unchanged.
BEHAVIOUR: dict[str, Any] = {
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "clip_qkv": None,
    "use_qk_norm": False,
    "attn_temperature_tuning": False,
}
# Settings of `BEHAVIOUR` that no field of `Semantics` reproduces, only code of the user's own.
_STEPS = ("use_qk_norm", "attn_temperature_tuning")
# Model types whose norms multiply by 1 + weight: their RMSNorms, or in `OFFSET_NORMS` all norms.
OFFSET_RMSNORMS = (
    "gemma gemma2 gemma3 gemma3_text minimax_m3_vl minimax_m3_vl_text muse_glimmer "
    "muse_glimmer_text muse_spark muse_spark_text qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text "
    "qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma step3p5 step3p7 t5gemma t5_gemma_module "
    "t5gemma2 t5gemma2_decoder t5gemma2_encoder t5gemma2_text vaultgemma"
)
OFFSET_NORMS = "nemotron moonshine_streaming moonshine_streaming_encoder"


@contextmanager
def read_once() -> Iterator[None]:
    """Within it, `read` opens every configuration once: a conversion asks for its own 25 times.

    Afterwards the contents are dropped, so that no later call misses a change of the file.
    """
    token = _contents.set({})
    try:
        yield
    finally:
        _contents.reset(token)


def read(path: Path) -> Json:
    """The content of the config.json next to a checkpoint; an empty dict if there is no file.

    Without a config.json, one of `OTHERS` is read; its keys become those of transformers.

    Raises ValueError or RecursionError if it cannot be read. It also raises for a FIFO, a device
    and a link, which it does not open; it follows links of a Hugging Face cache, and raises if one
    is broken: an interrupted download leaves such links.
    """
    contents = _contents.get()
    if contents is None:
        return _read(path)
    if path.parent not in contents:
        contents[path.parent] = _read(path)
    return contents[path.parent]


def _read(path: Path) -> Json:
    for name in (CONFIG, *OTHERS):
        try:
            with open_folder(path.parent) as folder:
                source = open_inside(folder, name)
            break
        except UnreadableFile as error:
            absent = isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)
            if not absent or (path.parent / name).is_symlink():
                raise
    else:
        return {}
    try:
        most = _LIMITS.document_bytes
        Budget(source.path, 0, _LIMITS).spend("its size", source.size, most)
        return _parsed(source.path, source.read(0, source.size))
    finally:
        source.close()


def checked_config(
    source: Path, model_types: Sequence[str], values: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """The configuration of a model, checked as `jaxmha.converters.config_of` describes."""
    folder = hub.fetch(source).folder if hub.is_address(source) else source
    path = file_of(folder if folder.is_file() else folder / CONFIG)
    content = read(path)  # first: it raises for a broken link, which `exists` would call absent
    if not path.exists():
        raise UnreadableFile(path, "there is no such file", "give the folder of a model")
    found = dict(content) if isinstance(content, Mapping) else {}
    if found.get("model_type") not in model_types:
        kind = printable(str(found.get("model_type")))
        raise ValueError(
            f"model_type of the folder is {kind}, expected {' or '.join(model_types)}: {path}"
        )
    for way, value in search(found, values):
        known = values[way[-1]]
        if value is not None and value not in known:
            raise ValueError(
                f"{'.'.join(way)} of the folder is {printable(str(value))}, expected "
                f"{' or '.join(map(str, known))}: {path}"
            )
    return found


@lru_cache(maxsize=1)
def _parsed(path: Path, raw: bytes) -> Json:
    """The parsed content of a configuration; cached, since one command reads it several times."""
    budget = Budget(path, len(raw), _LIMITS)
    if path.suffix == ".yaml":
        found = yaml_text.load(raw, budget)
    else:
        found = json_text.load(raw, budget, object_pairs_hook=json_text.unique)
    content: Json = other_configs.translated(found)
    return part_types.filled(content) if isinstance(content, Mapping) else content


def file_of(path: Path) -> Path:
    """The path of the config.json next to a checkpoint, or of the first file of `OTHERS` there."""
    files = (path.parent / name for name in (CONFIG, *OTHERS))
    return next((file for file in files if file.exists()), path.parent / CONFIG)


def search(content: Json, keys: Container[str]) -> Iterable[tuple[tuple[str, ...], Json]]:
    """Yields every value under one of the keys, with the path of keys that leads to it.

    Raises BudgetExceeded after `_MOST_FOUND` values.

    >>> list(search({"a": [{"n": 3}], "n": 5}, ["n"]))
    [(('a', 'n'), 3), (('n',), 5)]
    """
    # A path is a linked list (key, path of the parent), so that siblings share the path above them.
    todo: list[tuple[tuple[Any, ...], Json, bool]] = [((), content, False)]
    found = 0
    while todo:
        way, value, fresh = todo.pop()
        if fresh and way[0] in keys:
            found += 1
            if found > _MOST_FOUND:
                problem = f"has more than {_MOST_FOUND} values of {shown(way[0])} and the like"
                raise BudgetExceeded(CONFIG, problem, "leave it out, or shorten it")
            yield _keys(way), value
        if isinstance(value, dict):
            todo += [((key, way), item, True) for key, item in reversed(value.items())]
        elif isinstance(value, list):
            todo += [(way, item, False) for item in reversed(value)]


def _keys(way: tuple[Any, ...]) -> tuple[str, ...]:
    keys: list[str] = []
    while way:
        key, way = way
        keys.append(key)
    return tuple(reversed(keys))


def refuse_behaviour(path: Path) -> None:
    """Raises ValueError if the config.json next to a checkpoint changes the attention function.

    Without these settings, the weights would be read as another function. An unreadable
    configuration raises as well, since its settings would be ignored silently.

    Raises BudgetExceeded if the file is too large.
    """
    try:
        content = read(path)
    except MissingDependency:
        raise
    except BudgetExceeded as error:
        problem = "is too large to be read, and may hold settings of attention"
        remedy = "leave out its labels (id2label, label2id), or move it away"
        raise BudgetExceeded(file_of(path), problem, remedy) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{unreadable(path, error)}: it may hold settings of attention; correct it, "
            "or move it away"
        ) from error
    for (*_, key), value in search(content, BEHAVIOUR):
        if value not in (BEHAVIOUR[key], None):
            remedy = (
                "do it between jaxmha.project and jaxmha.dot_product_attention"
                if key in _STEPS
                else "set Semantics(scale=..., logits_soft_cap=..., clip_qkv=...)"
            )
            raise ValueError(
                f"{file_of(path)} has {key}={shown(value)}: it changes attention and is in "
                "no tensor, and is not read for this model_type, so that the blocks alone would "
                f"compute another function; read them by import_params and {remedy}"
            )


def unreadable(path: Path, error: Exception) -> str:
    """Describes why the config.json next to a checkpoint could not be read."""
    return f"{file_of(path)} cannot be read as {_KINDS[file_of(path).suffix]} ({type(error).__name__}: {error})"


EPSILONS = [
    "layer_norm_eps",
    "layer_norm_epsilon",
    "layernorm_epsilon",
    "rms_norm_eps",
    "norm_eps",
    "norm_epsilon",
]


def epsilons(path: Path) -> dict[str, tuple[float, ...]]:
    """The epsilons of norms in the config.json next to a checkpoint, by key.

    A key has several values if parts of the model have their own. Values other than positive finite
    numbers are left out.
    """
    found: dict[str, dict[float, None]] = {}
    for way, values in epsilons_by_way(readable(path)).items():
        found.setdefault(way[-1], {}).update(dict.fromkeys(values))
    return {key: tuple(values) for key, values in found.items()}


def epsilons_by_way(content: Json) -> dict[tuple[str, ...], tuple[float, ...]]:
    """The epsilons of norms in a configuration, by the path of keys that leads to them.

    >>> epsilons_by_way({"text_config": {"rms_norm_eps": 1e-6}, "layer_norm_eps": None})
    {('text_config', 'rms_norm_eps'): (1e-06,)}
    """
    found: dict[tuple[str, ...], dict[float, None]] = {}
    for way, value in search(content, EPSILONS):
        if _is_positive(value):
            found.setdefault(way, {})[float(value)] = None
    return {way: tuple(values) for way, values in found.items()}


def _is_positive(value: Json) -> TypeGuard[float]:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:
        return False


def model_types(file: object) -> list[str]:
    """The model types in the config.json next to an open checkpoint; none for a state in memory."""
    path = getattr(file, "path", None)
    return types_in(readable(path)) if isinstance(path, Path) else []


def types_in(content: Json) -> list[str]:
    """The model types in a configuration, each once.

    >>> types_in({"model_type": "llava", "text_config": {"model_type": "llama"}})
    ['llava', 'llama']
    """
    found = (value for _, value in search(content, ["model_type"]))
    return list(dict.fromkeys(value for value in found if isinstance(value, str) and value))


def offset_norms(path: Path) -> dict[str, str]:
    """Kind of norms -> the reason why other frameworks' norm layers do not compute them."""
    reason = "model_type {} of config.json: its norms multiply by 1 + weight, and others by weight"
    kinds: dict[str, str] = {}
    for _, value in search(readable(path), ["model_type"]):
        if value in (*OFFSET_RMSNORMS.split(), *OFFSET_NORMS.split()):
            kinds["rmsnorm"] = reason.format(value)
        if value in OFFSET_NORMS.split():
            kinds["norm"] = reason.format(value)
        if value == "mobilebert":
            kinds["norm"] = (
                "model_type mobilebert of config.json: its NoNorm only multiplies and adds"
            )
    for _, value in search(readable(path), ["normalization_type"]):
        if value == "layer_norm":
            kinds.pop("norm", None)
    return kinds


def unbiased_norms(path: Path) -> str:
    """The kind of the norms that have a scale and no bias: "rmsnorm", or "norm" for LayerNorm.

    The key of the epsilon in the config.json next to a checkpoint tells. Returns "asked" if it has a
    model_type but no epsilon: the user must name the kind, since Moonshine, for example, names its
    LayerNorms as Llama names its RMSNorms. Returns "" if it is absent, or tells neither kind.
    """
    content = readable(path)
    keys = {way[-1] for way, value in search(content, EPSILONS) if value is not None}
    if not keys and any(True for _ in search(content, ["model_type"])):
        return "asked"
    kinds = {"rms_norm_eps": "rmsnorm", "layer_norm_eps": "norm"}
    return kinds.get(keys.pop(), "") if len(keys) == 1 else ""


def readable(path: Path) -> Json:
    """The content of the config.json next to a checkpoint; empty if it is absent or unreadable.

    `head_count.in_config` reports an unreadable file.
    """
    try:
        return read(path)
    except (ValueError, RecursionError):
        return {}
