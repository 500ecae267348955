"""Fuzzes readers of checkpoints and whole commands, and writes down how many inputs they survived."""

import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments import frame, records
from jaxmha import checkpoint
from tests.fuzz import commands

READERS = (*(format.name for format in checkpoint.FORMATS), *commands.TARGETS)
LIBRARIES = ("atheris", "numpy", "h5py", "tensorstore")
EXAMPLES = """examples:
  python -m experiments.fuzz --seconds 600 --reader safetensors
  make soak                                        every reader, 10 minutes each, --write
"""


def soak(reader: str, seconds: int, folder: Path) -> dict[str, int]:
    """Runs one reader; what libFuzzer counted, and what it found."""
    corpus = folder / reader
    corpus.mkdir()
    command = [
        *(sys.executable, "-m", "tests.fuzz.target", reader, str(corpus)),
        *(f"-max_total_time={seconds}", "-max_len=65536", "-rss_limit_mb=4096", "-timeout=60"),
        # Slow is what takes CPU time, which the target measures; the machine may have others.
        *("-report_slow_units=3600", "-print_final_stats=1"),
        f"-artifact_prefix={folder}/{reader}-",
    ]
    done = subprocess.run(command, check=False, cwd=records.ROOT, capture_output=True, text=True)
    counted = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
    return {
        "seconds": seconds,
        "executions": int(counted[1]) if counted else 0,
        "coverage": int(covered[-1]) if covered else 0,
        "findings": len(list(folder.glob(f"{reader}-*"))),
        "exit_code": done.returncode,
    }


def kept() -> dict[str, dict[str, int]]:
    """Stored results of every reader; {} if the sources have changed since."""
    before = records.load(EXPERIMENT.path) if EXPERIMENT.path.is_file() else {}
    readers: dict[str, dict[str, int]] = before.get("readers", {})
    return readers if before.get("sources") == records.loaded() else {}


def measure(chosen: Namespace) -> dict[str, Any]:
    """Every reader, or those that are asked for."""
    libraries = {name: version(name) for name in LIBRARIES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.artifacts or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        results = {}
        readers = chosen.reader or READERS
        with ThreadPoolExecutor(chosen.jobs) as pool:
            runs = pool.map(lambda reader: soak(reader, chosen.seconds, folder), readers)
            for reader, result in zip(readers, runs, strict=True):
                results[reader] = result
                print(f"{reader}: {result}", file=sys.stderr, flush=True)
    return {
        "libraries": libraries,
        "jobs": chosen.jobs,
        "readers": kept() | results if chosen.write else results,
    }


def fine(found: dict[str, Any]) -> bool:
    """True if every reader exited with 0 and has no findings."""
    return not any(x["exit_code"] or x["findings"] for x in found["readers"].values())


EXPERIMENT = frame.of(
    measure,
    EXAMPLES,
    options={
        "--seconds": frame.number(600, "for each reader", least=1),
        "--reader": {"choices": READERS, "action": "append", "help": "only this one"},
        "--jobs": frame.number(1, "readers at a time", least=1),
        "--artifacts": {"type": Path, "help": "keep what crashed in this folder"},
    },
    result="results/fuzz.json",
    fine=fine,
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
