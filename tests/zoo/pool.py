"""Checks model types in processes that are replaced when they take too long."""

import json
import multiprocessing
import os
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

RESULTS = Path("build/zoo.json")
LIMIT = 60.0  # seconds of the processor for one type


def types() -> list[str]:
    """Every model type with a model, and those that stand for no other."""
    from transformers.models.auto import modeling_auto

    return sorted(modeling_auto.MODEL_MAPPING_NAMES)


def titles() -> list[str]:
    """Every model of another library."""
    from tests.zoo.other_models import MODELS

    return [one.title for one in MODELS]


def work(pipe: Connection, whole: bool) -> None:
    """Checks the types that come through a pipe, until None comes."""
    import torch
    import transformers

    from tests.zoo import one, other_check

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    while (model_type := pipe.recv()) is not None:
        try:
            check = other_check.check if "/" in model_type else one.check
            pipe.send(check(model_type, whole=whole))
        except Exception as error:  # noqa: BLE001 (a crash is a result)
            import traceback

            pipe.send({"type": model_type, "class": "crash", "why": f"{type(error).__name__}: {error}"[:300],
                       "trace": traceback.format_exc()[-1500:]})  # fmt: skip


class Worker:
    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, self.whole), daemon=True)
        self.process.start()
        self.type, self.since = "", 0.0

    def used(self) -> float:
        """Seconds of the processor that the process has taken."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def give(self, model_type: str) -> None:
        self.type, self.since = model_type, self.used()
        self.pipe.send(model_type)


def results(
    todo: list[str], workers: int, found: dict[str, Any], whole: bool = True
) -> dict[str, Any]:
    """Checks every type, and adds the results to `found`, which is kept in the file."""
    todo = list(reversed(todo))
    crew = [Worker(whole) for _ in range(min(workers, len(todo)))]
    for one in crew:
        one.give(todo.pop())
    while any(one.type for one in crew):
        ready = wait([one.pipe for one in crew if one.type], timeout=1.0)
        for one in crew:
            if not one.type:
                continue
            late = one.used() - one.since > LIMIT
            if one.pipe in ready or late:
                try:
                    made = one.pipe.recv() if one.pipe in ready else None
                except (EOFError, ConnectionResetError):
                    made = None
                if made is None:
                    why = f"more than {LIMIT:.0f} s" if late else "the process ended"
                    made = {"type": one.type, "class": "crash", "why": why}
                    one.process.kill()
                    one.start()
                found[made["type"]] = made
                keep(found)
                one.type = ""
                if todo:
                    one.give(todo.pop())
    for one in crew:
        one.process.kill()
    return found


def keep(found: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    new = RESULTS.with_suffix(".new")
    new.write_text(json.dumps(found, indent=1))
    new.replace(RESULTS)


def summary(found: dict[str, Any]) -> str:
    """Counts by class, and the types of every class but the right ones."""
    counts = Counter(one["class"] for one in found.values())
    lines = [f"{count:4} {name}" for name, count in counts.most_common()]
    for name in counts:
        shown = sorted(t for t, one in found.items() if one["class"] == name)
        lines.append(f"{name}: {' '.join(shown)}")
    return "\n".join(lines)
