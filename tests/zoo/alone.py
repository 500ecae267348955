"""Runs single attention modules of a model whose whole run did not reach them."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from jaxmha import MHAParams
from tests.zoo import capture

BATCH, QUERIES, KEYS = 2, 16, 9
_QUERIES = ("hidden_states", "query", "q", "x", "queries", "latents", "hidden_state", "inputs")
_KEYS = ("key_value_states", "encoder_hidden_states", "key", "k", "context", "kv", "current_states",
         "cross_attention_states", "key_states")  # fmt: skip
_VALUES = ("value", "v", "value_states")


def run(model: Any, blocks: Sequence[tuple[str, MHAParams]]) -> capture.Run:
    """The record of calls of the modules at these paths, on drawn inputs, without masks."""
    torch.manual_seed(11)
    modules = dict(model.named_modules())
    with capture.recording(model) as found:
        for path, params in blocks:
            for kwargs in _arguments(modules, path, params):
                found.stack.clear()
                before, since = len(found.softmaxes), found.time
                try:
                    with torch.no_grad():
                        modules[path](**kwargs)
                    if len(found.softmaxes) > before:
                        break
                    found.forget(since)  # a softmax over one key tells nothing
                except Exception:  # noqa: BLE001 (whatever a module raises)
                    del found.softmaxes[before:]
                    found.forget(since)
    for softmax in found.softmaxes:
        softmax.alone = True
    return found


def path_of(paths: Sequence[str]) -> str:
    """The module that holds all these modules; "" if it is the model itself."""
    parts = [path.split(".") for path in paths if path]
    same = [names[0] for names in zip(*parts, strict=False) if len({*names}) == 1]
    return ".".join(same[:-1] if len(parts) == 1 or {*paths} == {".".join(same)} else same)


def _arguments(modules: dict[str, Any], path: str, params: MHAParams) -> Iterator[dict[str, Any]]:
    """Arguments to try: attention across, then to itself; to other keys, then to the same ones."""
    if path not in modules:
        return
    dtype = next(modules[path].parameters()).dtype
    signature = inspect.signature(modules[path].forward).parameters
    names = [n for n, p in signature.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [n for n in names if signature[n].default is inspect.Parameter.empty]
    wide, *others = (np.asarray(one.kernel).shape[0] for one in params[:3])
    for lengths in ((QUERIES, KEYS), (QUERIES, QUERIES)):
        query = torch.randn(BATCH, lengths[0], wide, dtype=dtype)
        key, value = (torch.randn(BATCH, lengths[1], width, dtype=dtype) for width in others)
        value = key if key.shape == value.shape else value
        given: dict[str, Any] = {
            name: x
            for group, x in ((_QUERIES, query), (_KEYS, key), (_VALUES, value))
            for name in names
            if name in group
        }
        if "position_embeddings" in names:
            given["position_embeddings"] = _rotary(modules, path, query)
        rest = dict.fromkeys(name for name in needed if name not in given)
        yield given | rest
        yield {n: x[:, None] if torch.is_tensor(x) else x for n, x in given.items()} | rest
        alone = {name: x for name, x in given.items() if name not in (*_KEYS, *_VALUES)}
        yield alone | dict.fromkeys(name for name in needed if name not in alone)


def _rotary(modules: dict[str, Any], path: str, x: Any) -> Any:
    """Cosine and sine of the nearest module of rotary positions around a path."""
    while path:
        path = path.rpartition(".")[0]
        around = modules[path]
        if (rotary := getattr(around, "rotary_emb", None)) is not None:
            try:
                return rotary(x, torch.arange(x.shape[1])[None])
            except Exception:  # noqa: BLE001 (one of other arguments)
                return None
    return None
