"""How should scores be tiled on this CPU?

The same attention, compiled under other sizes of blocks and other numbers of bands, in interleaved
rounds.
"""

import sys
import time
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

import jaxmha
from experiments import frame
from jaxmha import Mask
from jaxmha.implementations.tiled import bands, tuning

EXAMPLES = """examples:
  python -m experiments.tiling                    all of them, four minutes on a quiet machine
  python -m experiments.tiling --rounds 9 --write
"""
N, H = 8, 64


class Question(NamedTuple):
    """One entry of `questions.toml`; settings are entries of the library's table, by name."""

    what: str
    kind: str
    gradient: bool
    sizes: list[list[int]]
    chosen: str
    settings: dict[str, dict[str, Any]]


TABLE = tomllib.loads(Path(__file__).with_name("questions.toml").read_text())
QUESTIONS = [Question(**question) for question in TABLE["questions"]]


@contextmanager
def tuned(name: str, entries: dict[str, Any]) -> Iterator[None]:
    """The library under these entries of its table."""
    table = replace(tuning.TUNING["cpu"], **entries)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(tuning.TUNING, cpu=table))
        if name == "blocks":
            stack.enter_context(mock.patch.object(bands, "kind", return_value=None))
        yield


def program(question: Question, B: int, T: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function to time, and its arguments."""
    rng = np.random.default_rng(T)
    S = 77 if question.kind == "cross" else T
    heads = [jax.numpy.asarray(rng.standard_normal((B, n, N, H)), np.float32) for n in (T, S, S)]
    lengths = jax.numpy.asarray(np.linspace(T, T / 4, B).astype(int))

    masks = {"padded": Mask.lengths(key_value=lengths), "windowed": Mask.window(255, 0)}

    bias = rng.standard_normal((N, T, T)).astype(np.float32) if question.kind == "biased" else None

    def out(query: Any, key: Any, value: Any) -> Any:
        mask = masks.get(question.kind)
        return jaxmha.dot_product_attention(
            query, key, value, bias, mask=mask, is_causal=question.kind == "causal"
        )

    def gradients(query: Any, key: Any, value: Any) -> Any:
        return jax.vjp(out, query, key, value)[1](query)

    return gradients if question.gradient else out, tuple(heads)


def measure(question: Question, B: int, T: int, rounds: int) -> dict[str, Any]:
    """Seconds of a call and of compilation, by way to tile."""
    function, arguments = program(question, B, T)
    found: dict[str, Any] = {}
    compiled = {}
    wait: Any = jax.block_until_ready
    for name, entries in question.settings.items():
        forget: Any = jax.clear_caches
        forget()
        with tuned(name, entries):
            start = time.perf_counter()
            compiled[name] = jax.jit(lambda *x: function(*x)).lower(*arguments).compile()
        found[name] = {"compile": time.perf_counter() - start, "seconds": []}
    for run in compiled.values():
        wait(run(*arguments))
    calls = max(1, 2**22 // (B * T * T))
    for _ in range(rounds):
        for name, run in compiled.items():
            start = time.perf_counter()
            for _ in range(calls):
                wait(run(*arguments))
            found[name]["seconds"].append((time.perf_counter() - start) / calls)
    return {name: x | {"median": median(x["seconds"])} for name, x in found.items()}


def collect(chosen: Namespace) -> dict[str, Any]:
    """Every question, case by case."""
    entries = []
    with frame.bars(cases=sum(len(question.sizes) for question in QUESTIONS)) as tick:
        for question in QUESTIONS:
            cases = []
            for B, T in question.sizes:
                tick("cases", f"{question.what}, B={B} T={T}")
                cases.append({"B": B, "T": T, "ways": measure(question, B, T, chosen.rounds)})
            kept = {
                name: getattr(question, name) for name in ("what", "kind", "gradient", "chosen")
            }
            entries.append({**kept, "cases": cases})
    return {"rounds": chosen.rounds, "N": N, "H": H, "questions": entries}


EXPERIMENT = frame.Experiment(
    "tiling",
    __doc__,
    EXAMPLES,
    collect,
    options={"--rounds": frame.number(7, least=1)},
    seed="T of the case",
)

if __name__ == "__main__":
    sys.exit(frame.run(EXPERIMENT))
