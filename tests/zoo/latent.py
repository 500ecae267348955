"""Compares blocks of latent attention with their modules, by the output of each."""

from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmha import checkpoint, latent
from jaxmha.converters import huggingface
from jaxmha.converters.discovery import behaviours, hf_config, latent_blocks
from jaxmha.converters.layout.arrays import to_numpy
from tests.zoo.capture import Run
from tests.zoo.compared import MASKED, TOLERANCE
from tests.zoo.masked import FREE, Given


class Latent(NamedTuple):
    """A block: its parameters, its behaviour, and a row of the matrix by which its module is found."""

    prefix: str
    params: Any
    behaviour: huggingface.LatentBehaviour
    row: tuple[int, float, float]


def read(file: checkpoint.Checkpoint) -> list[Latent]:
    """Every block of latent attention of a saved model."""
    found = []
    for block in latent_blocks.find(file):
        state = {key: to_numpy(file[name]) for key, name in block.keys.items()}
        first = state["kv_b_proj.weight"][0]
        row = len(first), float(first[0]), float(first[-1])
        config = hf_config.readable(file.path)
        assert isinstance(config, dict)
        behaviour = _behaviour(config)
        params = huggingface.import_latent_params(state)
        found.append(Latent(block.prefix, params, behaviour, row))
    return found


def _behaviour(config: dict[str, Any]) -> huggingface.LatentBehaviour:
    """The behaviour by the first part of a configuration that has such attention."""
    for way, _ in hf_config.search(config, ["model_type"]):
        own, _ = behaviours.part(config, way[:-1])
        with suppress(ValueError):
            return huggingface.latent_behaviour(own)
    raise ValueError("no part of the configuration has latent attention")


def judged(one: Latent, run: Run, module: str, masks: Given) -> tuple[dict[str, Any], set[int]]:
    """The row of a block, and the softmaxes that it explains."""
    used = [s for s in run.softmaxes if s.used and s.module == module]
    told = [masks.against(_seen(softmax)) for softmax in used]
    errors = [_error(one, run, s, mask) for s, (mask, _) in zip(used, told, strict=True)]
    row = {"prefix": one.prefix, "layout": "deepseek", "ran": len(errors)}
    if not errors:
        return row | {"class": "not run"}, set()
    same = max(errors) <= TOLERANCE
    row |= {"class": "right" if same else "silently wrong", "kind": "equal" if same else "other",
            "error": max(errors), "why": "" if same else "output", "scheme": "rotary"}  # fmt: skip
    if same and (why := next((text for _, text in told if text), "")):
        row |= {"class": "masks said" if why.startswith(FREE) else "silently wrong", "why": why}
    return row, {id(softmax) for softmax in used}


def _seen(softmax: Any) -> Any:
    return softmax.logits.detach().double().numpy() > MASKED


def _error(one: Latent, run: Run, softmax: Any, valid: Any) -> float:
    calls = [c for c in run.calls.get(softmax.module, ()) if c.start < softmax.time < c.end]
    if not calls:
        return float("inf")
    inputs = [calls[0].kwargs.get("hidden_states"), *calls[0].args]
    x = next(x for x in inputs if x is not None).detach().double().numpy()
    out = calls[0].output[0].detach().double().numpy()
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda array: np.asarray(array, np.float64), one.params)
        mine = np.asarray(latent.latent_attention(wide, x, mask=valid, **one.behaviour._asdict()))
    live = valid.any((1, 3))
    return float(np.abs(mine - out)[live].max(initial=0.0) / np.abs(out).max())
