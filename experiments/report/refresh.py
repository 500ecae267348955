"""Runs experiments again, each in a process of its own, with a bar."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments import records
from experiments.report.registry import Experiment

TICK = 0.2
DEFAULTS = {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}


def remake(experiments: Sequence[Experiment], console: Console) -> dict[str, str]:
    """Runs them one after the other; name -> the last lines of those that failed."""
    failed: dict[str, str] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(e.seconds or 0 for e in experiments))
        done = 0.0
        for number, experiment in enumerate(experiments, 1):
            expected = experiment.seconds or 0
            label = f"{experiment.name} ({number} of {len(experiments)})"
            if not console.is_terminal:
                console.print(f"{label}: {experiment.page.COMMAND}", highlight=False)
            progress.update(task, description=label)

            def tick(seconds: float, start: float = done, most: float = 0.98 * expected) -> None:
                progress.update(task, completed=start + min(seconds, most))

            message = run(experiment.page.COMMAND, tick)
            if message is not None:
                failed[experiment.name] = message
            done += expected
            progress.update(task, completed=done)
    return failed


def run(command: str, tick: Callable[[float], None], root: Path = records.ROOT) -> str | None:
    """None, or what a command that failed said last."""
    program, *rest = shlex.split(command)
    program = sys.executable if program == "python" else program
    environment = {**DEFAULTS, **os.environ}
    start = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [program, *rest],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        try:
            while process.poll() is None:
                tick(time.monotonic() - start)
                time.sleep(TICK)
        finally:
            process.kill()
            process.wait()
        if process.returncode == 0:
            return None
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-5:]) or f"exit code {process.returncode}"
