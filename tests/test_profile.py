"""Where time goes is read from XLA's own trace."""

import doctest
import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import cases
from experiments.benchmarks.cases import Case
from experiments.profile import __main__ as profile
from experiments.profile import dispatch, environment, kernels, page, parts, work
from jaxmha import Mask, dot_product_attention
from jaxmha.implementations import one_block


def test_examples() -> None:
    for module in (environment, kernels, page, work):
        assert doctest.testmod(module).attempted
        assert not doctest.testmod(module).failed


@pytest.mark.parametrize("backend", ["xla", "torch"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_part_is_measured(
    backend: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "SECONDS", 0.0)
    case = cases.named(f"layer-{direction}-plain-B1-T64-E512")
    found = parts.measure(backend, case)
    assert found.keys() == {*parts.WHOLE[backend], *work.PARTS}
    assert all(seconds > 0 for seconds in found.values())
    row = page.split(found, next(iter(parts.WHOLE[backend])))
    assert sum(row.values()) == pytest.approx(2 * row["whole"])


def test_heads_that_flax_does_not_have_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """linen has as many key heads as query heads, nnx and torch's linear layers fewer."""
    monkeypatch.setattr(parts, "SECONDS", 0.0)
    case = cases.named("layer-forward-gqa-B8-T128-E512-K2")
    assert parts.measure("xla", case)["flax"] > 0
    assert parts.measure("torch", case)["torch"] > 0


def operations(case: Case) -> float:
    found = 0
    for step in itertools.chain.from_iterable(work.parts(case).values()):
        if isinstance(step, work.Product):
            found += 2 * step.times * math.prod(step.left) * step.right[-1]
    return float(found)


@pytest.mark.parametrize("name", parts.CASES)
def test_the_parts_are_all_products_of_a_layer(name: str) -> None:
    """What blocks multiply, times how many there are, is the work of the case; where pairs are
    masked it may be more, and is less than all pairs.
    """
    case = cases.named(name)
    if case.kind in ("causal", "padded"):
        plain = replace(case, kind="plain")
        assert case.flop <= operations(case) <= plain.flop
        assert operations(case) < plain.flop or (case.T, case.kind) == (512, "padded")
    else:
        assert operations(case) == case.flop


LAYERS = [
    case
    for case in cases.CASES
    if case.scope == "layer" and case.kind != "decode" and case.T <= 4096
]


@pytest.mark.parametrize("case", LAYERS, ids=[case.name for case in LAYERS])
def test_blocks_are_those_that_attention_has(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of the blocks, as they come while a program is traced; how many there are is work."""
    seen: set[tuple[int, ...]] = set()

    def forward(rules: Any, rows: Any, keys: Any, *others: Any) -> Any:
        seen.add((math.prod(rows.shape[:-2]), rows.shape[-2], keys.shape[-1]))
        return right_forward(rules, rows, keys, *others)

    def backward(rules: Any, per_row: Any, per_key: Any, *others: Any) -> Any:
        keys, slope = per_key[0], per_row[1]
        seen.add((math.prod(keys.shape[:-2]), slope.shape[-2], keys.shape[-2]))
        return right_backward(rules, per_row, per_key, *others)

    right_forward, right_backward = one_block.forward, one_block.backward
    monkeypatch.setattr(one_block, "forward", forward)
    monkeypatch.setattr(one_block, "backward", backward)

    def attend(query: Any, key: Any, value: Any) -> Any:
        mask = None if case.lengths is None else Mask.lengths(key_value=jnp.array(case.lengths))
        return dot_product_attention(
            query, key, value, mask=mask, is_causal=case.kind == "causal", implementation="blocked"
        )

    def both_ways(*heads: Any) -> Any:
        out, slopes = jax.vjp(attend, *heads)
        return slopes(out)

    shape: Any = jax.ShapeDtypeStruct
    query, key = (
        shape((case.B, size, heads, case.H), "float32")
        for size, heads in ((case.T, case.N), (case.S, case.K))
    )
    jax.clear_caches()  # type: ignore[no-untyped-call]
    jax.eval_shape(attend if case.direction == "forward" else both_ways, query, key, key)
    expected = [work.cut(case)]
    if case.direction == "backward":  # what is not differentiated is traced as well
        expected += [work.cut(case, gradient=True), work.cut(replace(case, direction="forward"))]
    assert seen == {(b.cells, b.rows, b.keys) for cut in expected for b in cut}


@pytest.mark.parametrize("run", [parts.in_xla, parts.in_torch], ids=["xla", "torch"])
@pytest.mark.parametrize("turned", [None, "left", "right"])
@pytest.mark.parametrize("many", ["left", "right"])
def test_a_part_is_the_product_that_it_says(run: Any, turned: Any, many: Any) -> None:
    part = work.Product(3, (2, 5, 7), (2, 7, 11), turned, many)
    left, right = parts.arrays(part, np.random.default_rng(0))
    given = {"left": left, "right": right}
    last = {name: x[-1] if name == many else x for name, x in given.items()}
    if turned:
        last[turned] = np.swapaxes(last[turned], -1, -2)
    (out,) = run([part], [(left, right)])()
    np.testing.assert_allclose(out, last["left"] @ last["right"], rtol=1e-4, atol=1e-4)


def test_calls_are_timed_eager_and_under_jit() -> None:
    found = dispatch.collect(calls=3)
    assert len(found) == 3
    assert all(0 < x < 1e6 for by_way in found.values() for x in by_way.values())
    assert {tuple(by_way) for by_way in found.values()} == {("eager", "under jit")}


def test_products_are_found_in_the_trace() -> None:
    case = cases.named("layer-forward-plain-B1-T64-E256")
    found = kernels.profile("jaxmha", case)
    assert found["kernels"]["products"] > 0
    assert set(found["kernels"]) <= {kind for _, kind in kernels.KINDS} | {kernels.MOVES}


def test_a_program_that_nothing_compiled_is_refused() -> None:
    case = cases.named("layer-forward-plain-B1-T64-E256")
    with pytest.raises(ValueError, match="no compiled program"):
        kernels.profile("torch-sdpa", case)


def test_an_unknown_case_gives_one_message() -> None:
    command = [sys.executable, "-m", "experiments.profile.kernels", "nothing"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "nothing" in found.stderr
    assert "Traceback" not in found.stderr


def test_where_nothing_can_be_stored_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").mkdir()
    monkeypatch.setattr(profile, "HERE", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        profile.main(["--write"])
    said = capsys.readouterr().err
    assert said == f"{tmp_path / 'results.json'}: results cannot be stored there: it is no file\n"
