"""Builds one model of another library, runs it, converts it, and compares every block."""

import importlib
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxmha.converters.discovery.live_model import HEADS
from tests.zoo import capture, drawn, others
from tests.zoo.one import CannotBuildError, cast, judged_run


def check(title: str, seed: int = 0, whole: bool = True) -> dict[str, Any]:
    """The result of one model, as `one.check` has it for a type of transformers."""
    import torch

    from tests.zoo.other_models import BY_TITLE

    warnings.simplefilter("ignore")
    start = time.perf_counter()
    chosen = BY_TITLE[title]
    if not others.installed(chosen.library):
        why = f"{chosen.library} is not installed"
        return {"type": title, "class": "cannot be built", "why": why}
    torch.manual_seed(seed)
    importlib.import_module(chosen.library)
    try:
        with capture.patching() as watch:
            model, args, kwargs = others.build(chosen)
            drawn.draw_weights(model.eval(), seed)
            _calibrate(model, args, kwargs)
            run = _recorded(watch, model, args, kwargs)
        found = judged_run(model, run, whole, save, heads_of(model))
    except (CannotBuildError, ImportError) as error:
        return {"type": title, "class": "cannot be built", "why": str(error)}
    found |= {"model": type(model).__name__, "ran": {}}
    return {"type": title, **found, "seconds": round(time.perf_counter() - start, 2)}


def _calibrate(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gives every batch norm the mean and variance of its input, without which numbers overflow."""
    import torch

    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad(), suppress(ValueError):  # a norm of one value has no variance
        if norms:
            model(*args, **kwargs)
    model.eval()


def _recorded(
    watch: capture.Watch, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> capture.Run:
    """The record of a run in float64, or in float32 if the model computes in it alone."""
    import torch

    problem: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        with capture.watching(watch, model) as run:
            try:
                with torch.no_grad():
                    model(
                        *(cast(x, dtype) for x in args),
                        **{k: cast(x, dtype) for k, x in kwargs.items()},
                    )
                return run
            except RuntimeError as error:
                problem = problem or error
    raise CannotBuildError(f"{type(problem).__name__}: {str(problem)[:200]}")


def save(model: Any, folder: Path) -> None:
    """Saves a model as its library does, or its state dict."""
    import torch
    from safetensors.torch import save_file

    model.to(torch.float32)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
        return
    if hasattr(model, "pretrained_cfg"):
        hub: Any = importlib.import_module("timm.models._hub")
        hub.save_config_for_hf(model, str(folder / "config.json"))
    if type(model).__module__.startswith("litgpt."):
        utils: Any = importlib.import_module("litgpt.utils")
        utils.save_config(model.config, folder)
    state = {name: x.clone().contiguous() for name, x in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")


def heads_of(model: Any) -> Callable[[str], int | None]:
    """The head count that the module of a block, one inside it, or one around it holds."""
    modules = dict(model.named_modules())

    def found(prefix: str) -> int | None:
        own = modules.get(prefix)
        inside = [] if own is None else list(own.modules())
        around = [
            modules.get(".".join(prefix.split(".")[:n])) for n in range(prefix.count("."), -1, -1)
        ]
        for one in (*inside, *around):
            own_heads = getattr(one, "attention_heads", None)  # of curated-transformers
            for value in (
                *(getattr(one, name, None) for name in HEADS),
                getattr(own_heads, "_n_query_heads", None),
            ):
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    return found
