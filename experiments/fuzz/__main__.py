"""Fuzzes readers of checkpoints and whole commands, and writes down how many inputs they survived.

    python -m experiments.fuzz --seconds 600 [--reader safetensors] [--write]

`make soak` gives every reader 10 minutes. The result is experiments/results/fuzz.json.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from experiments import records
from experiments.fuzz import commands
from jaxmha import checkpoint

READERS = (*(format.name for format in checkpoint.FORMATS), *commands.TARGETS)
ROOT = Path(__file__).parents[2]
RESULT = ROOT / "experiments" / "results" / "fuzz.json"
LIBRARIES = ("atheris", "numpy", "h5py", "tensorstore")


def soak(reader: str, seconds: int, folder: Path) -> dict[str, int | float | str]:
    """Runs one reader; what libFuzzer counted, and what it found."""
    corpus = folder / reader
    corpus.mkdir()
    command = [
        *(sys.executable, "-m", "experiments.fuzz.target", reader, str(corpus)),
        *(f"-max_total_time={seconds}", "-max_len=65536", "-rss_limit_mb=4096", "-timeout=60"),
        # Slow is what takes CPU time, which the target measures; the machine may have others.
        *("-report_slow_units=3600", "-print_final_stats=1"),
        f"-artifact_prefix={folder}/{reader}-",
    ]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    counted = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    found = sorted(file.name for file in folder.glob(f"{reader}-*"))
    result: dict[str, int | float | str] = {
        "seconds": seconds,
        "executions": int(counted[1]) if counted else 0,
        "coverage": int(covered[-1]) if covered else 0,
        "findings": len(found),
        "exit_code": done.returncode,
    }
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
    return result


def kept() -> dict[str, dict[str, int | float | str]]:
    """What the same sources have shown of other readers."""
    if not RESULT.is_file():
        return {}
    before = records.load(RESULT)
    readers: dict[str, dict[str, int | float | str]] = before.get("readers", {})
    return readers if before.get("sources") == records.sources() else {}


def main() -> int:
    """0 where nothing was found, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=int, default=600, help="for each reader (default: 600)")
    parser.add_argument("--reader", choices=READERS, action="append", help="only this one")
    parser.add_argument("--jobs", type=int, default=1, help="readers at a time (default: 1)")
    parser.add_argument("--artifacts", type=Path, help="keep what crashed in this folder")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.artifacts or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        results = {}
        readers = options.reader or READERS
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = pool.map(lambda reader: soak(reader, options.seconds, folder), readers)
            for reader, result in zip(readers, runs, strict=True):
                results[reader] = result
                print(f"{reader}: {result}", flush=True)
    if options.write:
        RESULT.parent.mkdir(exist_ok=True)
        found = {
            "libraries": {name: version(name) for name in LIBRARIES},
            "jobs": options.jobs,
        }
        records.save(RESULT, found | {"readers": kept() | results}, command="make soak")
    return int(any(result["exit_code"] or result["findings"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
