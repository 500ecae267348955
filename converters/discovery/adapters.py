"""Recognises adapters, such as LoRA, whose arrays change a layer and are not layers themselves."""

import re
from collections.abc import Iterable

from jaxmha.checkpoint.errors import printable

# Names that peft, diffusers, kohya, Keras and nnx give to the arrays of adapters.
_ADAPTERS = re.compile(
    r"(^|[./])lora_((embedding_)?[AB]|((kernel|embeddings)_)?[ab]|magnitude_vector|up|down)([./]|$)|[./]lora[./](up|down)[./]"
    r"|[./]\w*lora_linear_layer[./](up|down)[./]|[./](hada_w[12]_[ab]|lokr_w[12](_[ab])?|ia3_l|oft_[rR])([./]|$)"
)

_OF_KERAS = re.compile(r"lora_(kernel|embeddings)_[ab]$")


def find(names: Iterable[str]) -> list[str]:
    """The names of arrays that belong to adapters.

    >>> find(["q_proj.base_layer.weight", "q_proj.lora_A.weight", "kv_lora_rank.weight"])
    ['q_proj.lora_A.weight']
    """
    return [name for name in names if _ADAPTERS.search(name)]


def describe(names: Iterable[str]) -> str:
    """Says that there are adapters among these arrays, and what to do about it; or ""."""
    if not (found := find(names)):
        return ""
    many = "array is part" if len(found) == 1 else "arrays are parts"
    return printable(
        f"{len(found)} {many} of an adapter (LoRA or the like), such as {found[0]}: they change "
        f"layers of a base model, and are no layers: merge them into it first, {_merging(found[0])}"
    )


def _merging(name: str) -> str:
    """Says how to merge the adapter that has an array of this name."""
    leaf = re.split(r"[./]", name)[-1]
    if _OF_KERAS.match(leaf):
        return (
            "as Keras does by model.save_weights, and take the file, or load it without enable_lora"
        )
    if leaf in ("lora_a", "lora_b"):
        return "in nnx by adding lora_a @ lora_b to the kernel, and take the model without LoRA"
    return (
        "with peft by PeftModel.from_pretrained(base, folder).merge_and_unload(), and take the "
        "merged model"
    )


def refuse(names: Iterable[str]) -> None:
    """Raises ValueError, with the remedy, if arrays of these names belong to adapters."""
    if found := describe(names):
        raise ValueError(found)
