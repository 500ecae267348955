"""How should scores be tiled on this CPU?

The same attention, compiled under other sizes of blocks and other numbers of bands, in interleaved
rounds.
"""

import time
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import jax

from experiments import frame
from jaxmha.bench import data, jax_peers
from jaxmha.bench.case import Case
from jaxmha.bench.program import Program
from jaxmha.bench.worker import timed
from jaxmha.implementations.tiled import bands, tuning

EXAMPLES = """examples:
  python -m experiments.tiling                    all of them, four minutes on a quiet machine
  python -m experiments.tiling --rounds 9 --write
"""


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


def case_of(question: Question, B: int, T: int) -> Case:
    """The case of the harness that a question asks about at one size."""
    others: dict[str, dict[str, Any]] = {
        "windowed": {"kind": "causal", "window": 255},
        "biased": {"kind": "plain", "bias": True},
    }
    options = others.get(question.kind, {"kind": question.kind})
    S = 77 if question.kind == "cross" else T
    return Case("core", "backward" if question.gradient else "forward", B=B, T=T, S=S, **options)


def measure(question: Question, B: int, T: int, rounds: int) -> dict[str, Any]:
    """Seconds of a call and of compilation, by way to tile."""
    case = case_of(question, B, T)
    inputs, found, programs = data.make(case), dict[str, Any](), dict[str, Program]()
    for name, entries in question.settings.items():
        forget: Any = jax.clear_caches
        forget()
        programs[name] = jax_peers.program("jaxmha:blocked", case, inputs)
        with tuned(name, entries):
            start = time.perf_counter()
            programs[name].compile()
        found[name] = {"compile": time.perf_counter() - start, "seconds": []}
    for made in programs.values():
        made.run()
    calls = max(1, 2**22 // (B * T * T))
    for _ in range(rounds):
        for name, made in programs.items():
            found[name]["seconds"].append(timed(made.run, calls))
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
            kept = {x: getattr(question, x) for x in ("what", "kind", "gradient", "chosen")}
            entries.append({**kept, "cases": cases})
    return {"rounds": chosen.rounds, "N": Case.N, "H": Case.H, "questions": entries}


EXPERIMENT = frame.of(
    collect,
    EXAMPLES,
    options={"--rounds": frame.number(7, least=1)},
    seed="crc32 of the name of the case",
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
