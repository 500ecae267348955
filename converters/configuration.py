"""The config.json beside a checkpoint: what it says that no tensor holds."""

import json
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from jaxmha.converters.checkpoint.errors import UnreadableFile
from jaxmha.converters.checkpoint.limits import Budget, Limits
from jaxmha.converters.checkpoint.source import Source

CONFIG = "config.json"
_LARGEST = 16 << 20

# What it says of attention, and the value that changes nothing.
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
# Of these no setting of jaxmha does the same.
_STEPS = ("clip_qkv", "use_qk_norm", "attn_temperature_tuning")
# Models whose norms multiply by 1 + weight: those without a bias, or (`NORMS`) those with one too.
OFFSET_RMSNORMS = (
    "gemma gemma2 gemma3 gemma3_text minimax_m3_vl minimax_m3_vl_text muse_glimmer "
    "muse_glimmer_text muse_spark muse_spark_text qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text "
    "qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma step3p5 step3p7 t5gemma t5_gemma_module "
    "t5gemma2 t5gemma2_decoder t5gemma2_encoder t5gemma2_text vaultgemma"
)
OFFSET_NORMS = "nemotron"


def read(path: Path) -> Any:
    """What the config.json beside a checkpoint holds; nothing where there is none.

    Raises ValueError or RecursionError where it cannot be read; a FIFO or device is not opened.
    """
    try:
        source = Source(path.parent / CONFIG)
    except UnreadableFile as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return {}
        raise
    try:
        Budget(source.path, 0, Limits()).spend("its size", source.size, _LARGEST)
        return json.loads(source.read(0, source.size))
    finally:
        source.close()


def search(content: Any, keys: Container[str]) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Every value under one of the keys, with the keys on the way to it.

    >>> list(search({"a": [{"n": 3}], "n": 5}, ["n"]))
    [(('a', 'n'), 3), (('n',), 5)]
    """
    todo: list[tuple[tuple[str, ...], Any, bool]] = [((), content, False)]
    while todo:
        way, value, fresh = todo.pop()
        if fresh and way[-1] in keys:
            yield way, value
        if isinstance(value, dict):
            todo += [((*way, key), item, True) for key, item in reversed(value.items())]
        elif isinstance(value, list):
            todo += [(way, item, False) for item in reversed(value)]


def refuse_behaviour(path: Path) -> None:
    """Raises ValueError where the config.json beside a checkpoint changes attention itself.

    Weights alone would be read as another function.
    """
    for (*_, key), value in search(_readable(path), BEHAVIOUR):
        if value not in (BEHAVIOUR[key], None):
            remedy = (
                "do it between jaxmha.project and jaxmha.dot_product_attention"
                if key in _STEPS
                else "set Semantics(scale=..., logits_soft_cap=...)"
            )
            raise ValueError(
                f"{path.parent / CONFIG} has {key}={value!r}: it changes attention and is in no tensor, "
                f"so that a file of another layout would lose it; read the blocks by import_params and {remedy}"
            )


def epsilons(path: Path) -> dict[str, float]:
    """What the config.json beside a checkpoint says of the epsilon of norms, by key."""
    keys = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    found = search(_readable(path), keys)
    return {way[-1]: float(value) for way, value in found if type(value) in (int, float)}


def offset_norms(path: Path) -> dict[str, str]:
    """Kinds of norms that no norm of another framework computes, and why: kind -> reason."""
    reason = "model_type {} of config.json: its norms multiply by 1 + weight, and others by weight"
    kinds: dict[str, str] = {}
    for _, value in search(_readable(path), ["model_type"]):
        if value in (*OFFSET_RMSNORMS.split(), *OFFSET_NORMS.split()):
            kinds["rmsnorm"] = reason.format(value)
        if value in OFFSET_NORMS.split():
            kinds["norm"] = reason.format(value)
        if value == "mobilebert":
            kinds["norm"] = (
                "model_type mobilebert of config.json: its NoNorm only multiplies and adds"
            )
    for _, value in search(_readable(path), ["normalization_type"]):
        if value == "layer_norm":
            kinds.pop("norm", None)
    return kinds


def unbiased_norms(path: Path) -> str:
    """The kind of the norms without a bias, where the config.json beside a checkpoint says it."""
    keys = {way[-1] for way, _ in search(_readable(path), ["rms_norm_eps", "layer_norm_eps"])}
    told = {"rms_norm_eps": "rmsnorm", "layer_norm_eps": "norm"}
    return told[keys.pop()] if len(keys) == 1 else ""


def _readable(path: Path) -> Any:
    """As `read`; nothing where it cannot be read, which `heads.in_config` says where it matters."""
    try:
        return read(path)
    except (ValueError, RecursionError):
        return {}
