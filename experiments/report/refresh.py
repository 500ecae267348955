"""Runs experiments again, each in a process of its own, with a bar."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from experiments import records
from experiments.report.registry import Entry

DEFAULTS = {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}


def remake(experiments: Sequence[Entry], console: Console) -> dict[str, str]:
    """Runs them one after the other; name -> the last lines of those that failed."""
    failed: dict[str, str] = {}
    for experiment in track(experiments, "running", console=console, transient=True):
        command = experiment.page.command
        console.print(f"{experiment.name}: {command}", highlight=False)
        message = run(command)
        if message is not None:
            failed[experiment.name] = message
    return failed


def run(command: str, root: Path = records.ROOT) -> str | None:
    """None, or what a command that failed said last."""
    program, *rest = shlex.split(command)
    program = sys.executable if program == "python" else program
    done = subprocess.run(
        [program, *rest],
        cwd=root,
        env={**DEFAULTS, **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-5:]) or f"exit code {done.returncode}"
