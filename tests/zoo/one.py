"""Builds one model type, runs it, converts it, and compares every block with its module."""

import importlib
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.zoo import alone, capture, drawn, judged, saved, shrink
from tests.zoo.overrides import ATTENTION, CLASSES, UNBUILT

MAPPINGS = (
    "MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_FOR_BACKBONE_MAPPING", "AUTO_MODEL_FOR_ANY_TO_ANY_MAPPING",
)  # fmt: skip
MOST = 40_000_000  # parameters of a model that is built


class CannotBuildError(Exception):
    """A model type has no tiny model here."""


def classes(model_type: str) -> list[Any]:
    """Model classes of a type, the base model first."""
    from transformers.models.auto import modeling_auto

    names: list[str] = [CLASSES[model_type]] if model_type in CLASSES else []
    for mapping in (
        *MAPPINGS,
        *(n.removesuffix("_NAMES") for n in dir(modeling_auto) if n.endswith("MAPPING_NAMES")),
    ):
        found = getattr(modeling_auto, f"{mapping}_NAMES", {}).get(model_type, ())
        names += [found] if isinstance(found, str) else list(found)
    if "." in names[0]:
        module, _, name = names[0].rpartition(".")
        return [getattr(importlib.import_module(f"transformers.models.{module}"), name)]
    return [
        getattr(transformers, name) for name in dict.fromkeys(names) if hasattr(transformers, name)
    ]


def build(model_type: str, factor: int, seed: int) -> Any:
    """A model with drawn weights, whose widths are divided by `factor`."""
    errors: list[str] = []
    for kind in classes(model_type)[:2]:
        try:
            config = shrink.tiny(model_type, factor)
            attention = ATTENTION.get(model_type, "eager")
            how = {"attn_implementation": attention, "experts_implementation": "eager"}
            with torch.device("meta"):
                size = sum(p.numel() for p in kind._from_config(config, **how).parameters())
            if size > MOST:
                raise CannotBuildError(f"{size} parameters")
            torch.manual_seed(seed)
            model = kind._from_config(config, **how, dtype=torch.float32).eval()
            drawn.draw_weights(model, seed)
            return model
        except Exception as error:  # noqa: BLE001 (whatever a model raises)
            errors.append(f"{kind.__name__} / {factor}: {type(error).__name__}: {str(error)[:200]}")
    raise CannotBuildError(errors[0] if errors else "no class")


def towers(model: Any) -> Iterator[tuple[str, Any]]:
    """The models inside a model, the model itself first."""
    from transformers import PreTrainedModel

    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            yield name, module


def run_all(model: Any, model_type: str, run: Any) -> dict[str, str]:
    """Runs the model; then each part of it none of whose attention has run. Errors by part."""
    ran: dict[str, str] = {}
    for name, part in towers(model):
        inside = [s for s in run.softmaxes if not name or s.module.startswith(f"{name}.")]
        if not (name and inside):
            ran[name or "(top)"] = _run_one(part, "" if name else model_type, run)
    return ran


def _run_one(part: Any, model_type: str, run: Any) -> str:
    """Runs a model on the first arguments that it takes; the first error if it takes none."""
    errors = []
    try:
        for feed in drawn.feeds(part, model_type):
            run.stack.clear()
            before, since = len(run.softmaxes), run.time
            dtype = next(part.parameters()).dtype
            try:
                with torch.no_grad():
                    part(**{k: cast(v, dtype) for k, v in feed.items()})
                run.paddings += [
                    np.asarray(v) != 0
                    for k, v in feed.items()
                    if "mask" in k and getattr(v, "ndim", 0) == 2
                ]
                return ""
            except Exception as problem:  # noqa: BLE001 (whatever a model raises)
                del run.softmaxes[before:]
                run.forget(since)
                shapes = {k: tuple(getattr(v, "shape", ())) for k, v in feed.items()}
                errors.append(f"{type(problem).__name__}: {str(problem)[:160]} {shapes}")
    except Exception as problem:  # noqa: BLE001
        errors.append(f"inputs: {type(problem).__name__}: {str(problem)[:160]}")
    return errors[0] if errors else "no arguments known"


def cast(value: Any, dtype: Any) -> Any:
    """A floating tensor in another dtype; any other value unchanged."""
    return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value


def record(model: Any, model_type: str) -> tuple[Any, dict[str, str]]:
    """The record of a run in float64, or in float32 where the model cannot."""
    best: tuple[Any, dict[str, str]] | None = None
    best_finite = True
    for dtype in (torch.float64, torch.float32):
        _to(model, dtype)
        with capture.recording(model) as run:
            ran = run_all(model, model_type, run)
        finite = not any(s.logits.isnan().any() for s in run.softmaxes)
        better = best is not None and best[1]["(top)"] and not ran["(top)"]
        if best is None or better or not best_finite or len(run.softmaxes) > len(best[0].softmaxes):
            best, best_finite = (run, ran), finite
        if (not ran["(top)"] and finite) or (
            ran["(top)"] and "dtype" not in (text := ran["(top)"].lower()) and "float" not in text
        ):
            break
    assert best is not None
    return best


def _to(model: Any, dtype: Any) -> None:
    """Casts a model, except complex buffers, which torch would make real."""
    kept = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_complex()
    ]
    model.to(dtype)
    for module, name, buffer in kept:
        setattr(module, name, buffer)


def check(model_type: str, seed: int = 0, whole: bool = True) -> dict[str, Any]:
    """The result of one type: its class, its blocks, and what was said.

    `whole`: jaxmha itself computes one block of every kind as well, which compiles for seconds.
    """
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    if model_type in UNBUILT:
        return {"type": model_type, "class": "cannot be built", "why": UNBUILT[model_type]}
    made: tuple[Any, Any, dict[str, str], int] | None = None
    why = ""
    for factor in shrink.FACTORS:
        try:
            model = build(model_type, factor, seed)
        except CannotBuildError as error:
            why = why or str(error)
            continue
        run, ran = record(model, model_type)
        if made is None or len(run.softmaxes) > len(made[1].softmaxes):
            made = model, run, ran, factor
        if not ran["(top)"] or not _of_sizes(ran["(top)"]):
            break
    if made is None:
        return {"type": model_type, "class": "cannot be built", "why": why}
    model, run, ran, factor = made
    try:
        found = judged_run(model, run, whole, _save)
    except CannotBuildError as error:
        return {"type": model_type, "class": "cannot be built", "why": str(error)}
    if not found["softmaxes"] and all(ran.values()):
        named = found["blocks"] or found["carried"] or found["damaged"]
        label = "cannot be built" if named else "no attention"
        label = "refused" if found.get("refused") and named else label
        found |= {"class": label, "why": ran["(top)"]}
    found |= {"model": type(model).__name__, "factor": factor}
    found["ran"] = {name: error for name, error in ran.items() if error}
    return {"type": model_type, **found, "seconds": round(time.perf_counter() - start, 2)}


def _of_sizes(error: str) -> bool:
    """True if another factor may mend the error."""
    return not error.startswith(("TypeError", "no arguments", "inputs"))


def _save(model: Any, folder: Path) -> None:
    try:
        _to(model, torch.float32)
        model.save_pretrained(folder)  # the numbers are those of float32
    except Exception as error:
        raise CannotBuildError(f"saving: {type(error).__name__}: {str(error)[:200]}") from error


def _left(run: Any, blocks: Any, owned: Any) -> dict[str, tuple[str, Any]]:
    """Prefix -> module and parameters of each block that the run of its model did not reach."""
    return {
        blocks[i][0].prefix: (alone.path_of(owned[i]), blocks[i][1])
        for i in judged.not_reached(run, owned)
    }


def judged_run(
    model: Any, run: Any, whole: bool, save: Callable[[Any, Path], None], heads: saved.Heads = None
) -> dict[str, Any]:
    """Saves a model, converts it, and compares its blocks with its run."""
    folder = Path(tempfile.mkdtemp(prefix="zoo-"))
    try:
        save(model, folder)
        blocks, said = saved.read(folder, heads, whole)
        held = judged.Rows(model)
        owned = [None if p is None else judged.owners(b, p, held) for b, p, *_ in blocks]
        left = {} if heads is not None else _left(run, blocks, owned)
        if left:
            run.add(alone.run(model, list(left.values())))
        return judged.judge(run, blocks, owned, said, held, whole, [*left])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
