"""Which flags of XLA and settings of the allocator help on this CPU, and how long does a call take
on the smallest arrays?

Both belong to the process: the library sets none of them. Every setting runs in processes of its
own, in turns, and the fastest of them counts, because a disturbance only adds time. Outputs are
checked against float64.
"""

import json
import os
import subprocess
import sys
import timeit
import tomllib
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import jaxmha
from experiments import frame
from jaxmha.bench import machine

EXAMPLES = """examples:
  python -m experiments.environment                    ten minutes on a quiet machine
  python -m experiments.environment --rounds 5 --json
"""
TABLE = tomllib.loads(Path(__file__).with_name("settings.toml").read_text())
SETTINGS: dict[str, dict[str, str]] = TABLE["settings"]
CASES: list[str] = TABLE["cases"]


def measured(variables: dict[str, str]) -> dict[str, dict[str, float]]:
    """Seconds of a call and largest error of every case, by name, in a process of its own.

    Raises:
      ValueError: the process ended with an error, or a case was not computed.
    """
    command = [sys.executable, "-m", "experiments.benchmarks", "--json", "--peer", "jaxmha"]
    command += ["--rounds", "3", *(part for case in CASES for part in ("--case", case))]
    own = {name: x for name, x in os.environ.items() if name not in machine.settings()}
    ran = subprocess.run(command, env=own | variables, capture_output=True, text=True, check=False)
    shown = " ".join(f"{name}={value}" for name, value in variables.items())
    if ran.returncode:
        raise ValueError(f"{shown}: {ran.stderr.strip().splitlines()[-1]}")
    found = {}
    for entry in json.loads(ran.stdout)["cases"]:
        ours = entry["peers"]["jaxmha"]
        if "failed" in ours:
            raise ValueError(f"{shown}: {ours['failed']}")
        found[entry["name"]] = {"seconds": median(ours["seconds"]), "error": ours["error"]}
    return found


def calls(count: int = 1000) -> dict[str, dict[str, float]]:
    """Microseconds of a call on the smallest arrays, by function: eager and under jit."""
    heads = jnp.ones((1, 1, 1, 8))
    params = jaxmha.init_params(jax.random.key(0), num_heads=1, features=8)
    called: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "dot_product_attention": (jaxmha.dot_product_attention, (heads, heads, heads)),
        "multi_head_attention": (jaxmha.multi_head_attention, (params, jnp.ones((1, 1, 8)))),
        "jax.nn.dot_product_attention": (jax.nn.dot_product_attention, (heads, heads, heads)),
    }
    return {
        name: {
            "eager": _microseconds(function, arguments, count),
            "under jit": _microseconds(jax.jit(function), arguments, count),
        }
        for name, (function, arguments) in called.items()
    }


def _microseconds(function: Callable[..., Any], arguments: tuple[Any, ...], count: int) -> float:
    wait: Any = jax.block_until_ready
    wait(function(*arguments))
    return 1e6 * median(timeit.repeat(lambda: wait(function(*arguments)), number=1, repeat=count))


def collect(chosen: Namespace) -> dict[str, Any]:
    """Settings, seconds (the least of all rounds) and errors by setting and case, and calls."""
    runs: dict[str, list[Any]] = {name: [] for name in SETTINGS}
    with frame.bars(settings=chosen.rounds * len(SETTINGS)) as tick:
        for i in range(chosen.rounds):
            for name, variables in SETTINGS.items():
                runs[name].append(measured(variables))
                tick("settings", f"settings: {name}, round {i + 1} of {chosen.rounds}")
    results = {
        name: {
            case: {key: min(run[case][key] for run in found) for key in ("seconds", "error")}
            for case in CASES
        }
        for name, found in runs.items()
    }
    return {"rounds": chosen.rounds, "settings": SETTINGS, "results": results, "calls": calls()}


EXPERIMENT = frame.of(
    collect, EXAMPLES, options={"--rounds": frame.number(3, least=1)}, seed="T of the case"
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
