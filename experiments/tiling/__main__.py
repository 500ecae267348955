"""How should scores be tiled on this CPU?

The same attention, compiled under other sizes of blocks and other numbers of bands, in interleaved
rounds.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
MIB = 2**20


class Setting(NamedTuple):
    """One tuning: entries of the library's table that it replaces; no bands if `bands` is False."""

    name: str
    entries: dict[str, Any]
    bands: bool = True


class Question(NamedTuple):
    """An attention of one kind at several sizes (B, T), and the settings to compare.

    `chosen`: the name of the setting that equals the library's default.
    """

    what: str
    kind: str
    gradient: bool
    sizes: tuple[tuple[int, int], ...]
    settings: tuple[Setting, ...]
    chosen: str


def _bytes(name: str, *counts: int) -> tuple[Setting, ...]:
    return tuple(Setting(f"{c} MiB", {name: c * MIB}) for c in counts)


def _rows(name: str, *counts: int) -> tuple[Setting, ...]:
    free = {"kernel_bytes": MIB, "least_rows_bytes": 64 * MIB}
    return tuple(Setting(f"{c} rows", {name: c, **free}) for c in counts)


BLOCKS = Setting("blocks", {}, bands=False)


def _row_bands(*rules: tuple[tuple[int, int], ...]) -> tuple[Setting, ...]:
    def name(rule: tuple[tuple[int, int], ...]) -> str:
        return ", ".join(f"up to {count} of {least}" for least, count in rule)

    return (BLOCKS, *(Setting(name(rule), {"row_bands": rule}) for rule in rules))


def _key_bands(*counts: int) -> tuple[Setting, ...]:
    return (BLOCKS, *(Setting(f"up to {c} bands", {"key_bands": c}) for c in counts))


def _sides(name: str, *sides: tuple[int, int]) -> tuple[Setting, ...]:
    return tuple(
        Setting(f"{side}, {c} MiB", {name: side, "heads_bytes": c * MIB}) for side, c in sides
    )


@contextmanager
def tuned(setting: Setting) -> Iterator[None]:
    """The library under this setting."""
    table = replace(tuning.TUNING["cpu"], **setting.entries)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(tuning.TUNING, cpu=table))
        if not setting.bands:
            stack.enter_context(mock.patch.object(bands, "kind", return_value=None))
        yield


QUESTIONS = (
    Question(
        "rows of a block without conditions", "plain", False, ((1, 1024), (1, 2048), (1, 4096)),
        _rows("least_rows_kernel", 256, 512, 1024, 2048), "1024 rows",
    ),
    Question(
        "rows of a block without conditions, in the gradient", "plain", True,
        ((1, 1024), (1, 2048), (1, 4096)), _rows("least_rows_gradient", 256, 512, 1024), "512 rows",
    ),
    Question(
        "bytes of a small head of 77 keys, in units of 256 KiB", "cross", False,
        ((2, 512), (2, 1023), (2, 2048)),
        tuple(Setting(f"{c}", {"few_keys_factor": c}) for c in (1, 2, 4, 16)), "4",
    ),
    Question(
        "bytes of the heads of a block of 77 keys, in the gradient", "cross", True,
        ((2, 512), (2, 1024), (1, 2048), (8, 1024)), _bytes("few_keys_gradient_bytes", 2, 4, 8, 16), "8 MiB",
    ),
    Question(
        "bytes of scores up to which few steps are no loop", "plain", False,
        ((1, 512), (2, 512), (4, 333), (1, 1024)), _bytes("unroll_bytes", 0, 16, 32), "16 MiB",
    ),
    Question(
        "bytes of the heads of a block", "plain", False, ((2, 333), (2, 512), (8, 512)),
        _bytes("heads_bytes", 1, 2, 4, 8), "4 MiB",
    ),
    Question(
        "bytes of the heads of a block, in the gradient", "plain", True,
        ((2, 333), (2, 512), (8, 512)), _bytes("heads_bytes", 1, 2, 4, 8), "4 MiB",
    ),
    Question(
        "bytes of a block with a bias, in the gradient", "biased", True, ((1, 1024), (1, 2048)),
        _bytes("tile_bytes", 1, 2, 4, 8), "2 MiB",
    ),
    Question(
        "bands of causal rows", "causal", False, ((2, 512), (1, 1024), (1, 2048), (1, 4096)),
        _row_bands(((256, 4),), ((128, 4), (256, 8)), ((128, 8),), ((256, 16),)),
        "up to 4 of 128, up to 8 of 256",
    ),
    Question(
        "bands of padded keys", "padded", False, ((8, 512), (4, 1024), (4, 2048)),
        _key_bands(1, 2, 4, 8), "up to 4 bands",
    ),
    Question(
        "rows and keys of a block, where some are left out", "causal", True,
        ((2, 512), (1, 1024), (1, 2048), (1, 4096)),
        _sides("side", (256, 2), (512, 2), (512, 4), (1024, 4)), "512, 4 MiB",
    ),
    Question(
        "rows and keys of a block within a window of 256 keys", "windowed", True,
        ((1, 1024), (1, 2048), (1, 4096)),
        _sides("window_side", (64, 2), (64, 4), (128, 4), (256, 4)), "64, 4 MiB",
    ),
)  # fmt: skip


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
    for setting in question.settings:
        forget: Any = jax.clear_caches
        forget()
        with tuned(setting):
            start = time.perf_counter()
            compiled[setting.name] = jax.jit(lambda *x: function(*x)).lower(*arguments).compile()
        found[setting.name] = {"compile": time.perf_counter() - start, "seconds": []}
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
    if chosen.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {chosen.rounds}")
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
    options={"--rounds": {"type": int, "default": 7, "help": "default 7"}},
    seed="T of the case",
)

if __name__ == "__main__":
    sys.exit(frame.run(EXPERIMENT))
