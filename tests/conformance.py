"""The contract of every implementation: checks of one implementation on one case.

The tests choose implementations, cases and dtypes; a check compiles what it needs once.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmha
from jaxmha import dropout
from jaxmha.implementations import CONTEXT, IMPLEMENTATIONS, KERNELS, UnsupportedError
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.implementations.native import library
from jaxmha.implementations.tiled import attention, loop
from jaxmha.implementations.tiled.tiling import Tiling
from jaxmha.implementations.tiled.tuning import TUNING
from tests import cases, reference, tolerance
from tests.cases import Case

# Fused kernels take a part of the cases: tests/kernel_cases.py. The native kernels are tested where
# their library is built.
ABSENT = () if library.unavailable() is None else ("native",)
native_built = pytest.mark.skipif("native" in ABSENT, reason="jaxmha-cpu is not built")
PLAIN = [name for name in IMPLEMENTATIONS if name not in (*KERNELS, *CONTEXT, *ABSENT)]
by_implementation = pytest.mark.parametrize("implementation", PLAIN)
DIFFERENTIABLE = ("query", "key", "value", "bias")


def shape_of_weights(case: Case) -> tuple[int, int, int, int]:
    return (case.B or 1, case.N, case.T, case.S)


OUTPUTS: dict[bytes, reference.Output] = {}  # the last few: the specification is slow


def expected(case: Case, arrays: dict[str, Any]) -> reference.Output:
    """The output of the specification to the same, already rounded, arrays."""
    question = pickle.dumps((case, arrays))
    if question not in OUTPUTS:
        if len(OUTPUTS) == 4:
            OUTPUTS.pop(next(iter(OUTPUTS)))
        OUTPUTS[question] = computed(case, arrays)
    return OUTPUTS[question]


def computed(case: Case, arrays: dict[str, Any]) -> reference.Output:
    options = dict(case.options)
    broadcast = options.pop("dropout_broadcast", ())
    if case.dropout_rate:
        draws = jax.jit(dropout.keep, static_argnums=(1, 2, 3))(
            jax.random.key(7), case.dropout_rate, shape_of_weights(case), broadcast
        )
        options["dropout_keep"] = np.asarray(draws)
    return reference.dot_product_attention(**arrays, **options)


def tune(monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> None:
    """Changes the tuning table of CPUs."""
    monkeypatch.setitem(TUNING, "cpu", replace(TUNING["cpu"], **sizes))


def tilings_of_gradients(monkeypatch: pytest.MonkeyPatch) -> list[Tiling]:
    """A list to which every gradient of the tiled implementation appends its tiling."""
    tilings: list[Tiling] = []

    def seen(tiling: Tiling, *rest: Any) -> Any:
        tilings.append(tiling)
        return loop.backward(tiling, *rest)

    monkeypatch.setattr(attention, "backward", seen)
    return tilings


# Two rows and three keys of one head: T and S of the cases are no multiples of them.
TWO_ROWS = {"target": 4 * 7 * 2 * 2, "least_rows": 2, "side": 3}


def tiled(name: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> str:
    """Tiles of these sizes, in an implementation of a name for which nothing is compiled yet."""
    monkeypatch.setattr(attention, "SIZES", sizes)
    monkeypatch.setitem(WITHOUT_WEIGHTS, name, "as blocked")
    made: Any = SimpleNamespace(
        unsupported_reason=attention.unsupported_reason, attend=attention.attend
    )
    monkeypatch.setitem(IMPLEMENTATIONS, name, made)
    return name


def call(case: Case, implementation: str, **extra: Any) -> Callable[[dict[str, Any]], Any]:
    """A function of the arrays of a case."""
    options = {**case.options, "implementation": implementation, **extra}
    if case.dropout_rate:
        options["dropout_key"] = jax.random.key(7)
    return lambda arrays: jaxmha.dot_product_attention(**arrays, **options)


# Implementations that return no weights, and why.
WITHOUT_WEIGHTS: dict[str, str] = dict.fromkeys(
    ("blocked", "native", "cudnn", "tokamax", "splash"), "weights are never materialised"
)


def declines(case: Case, implementation: str, dtype: str) -> bool:
    """True if an implementation has to refuse a case; asserts that it does, with the reason."""
    reasons = []
    if implementation == "native":
        reasons = ["got float64"] * (dtype == "float64") + ["no dropout"] * bool(case.dropout_rate)
    if implementation == "blocked" and case.fully_masked == "mean" and not case.sinks:
        reasons = ["the mean of fully masked rows has no dropout"] * bool(case.dropout_rate)
    if reasons:
        with pytest.raises(UnsupportedError, match=reasons[0]):
            call(case, implementation)(cases.arrays(case, dtype))
    return bool(reasons)


def values(case: Case, implementation: str, dtype: str, *, jit: bool) -> None:
    """Output, weights before and after dropout, and lse are those of the specification."""
    if declines(case, implementation, dtype):
        return
    arrays = cases.arrays(case, dtype)
    want = expected(case, arrays)
    if implementation in WITHOUT_WEIGHTS:
        run = call(case, implementation, return_lse=True)
        alone = call(case, implementation)  # without lse another program may run
        both_of = jax.jit(lambda arrays: (*run(arrays), alone(arrays))) if jit else run
        out, lse, *others = both_of(arrays)
        assert out.dtype == arrays["query"].dtype
        assert lse.dtype == ("float64" if dtype == "float64" else "float32")
        tolerance.assert_close(lse, want.lse, "lse")
        for x, name in zip((out, *others), ("output", "output alone"), strict=False):
            tolerance.assert_close(x, want.out, name)
            assert not np.asarray(x)[want.out == 0].any(), "a row that has to be exactly 0"
        return
    kinds = ["before_dropout", *(["after_dropout"] if case.dropout_rate else [])]
    for kind in kinds:
        run = call(case, implementation, return_weights=kind, return_lse=True)
        out, weights, lse = (jax.jit(run) if jit else run)(arrays)
        assert out.dtype == weights.dtype == arrays["query"].dtype
        assert lse.dtype == ("float64" if dtype == "float64" else "float32")
        tolerance.assert_close(out, want.out, "output")
        assert not np.asarray(out)[want.out == 0].any(), "a row that has to be exactly 0"
        shown = want.weights if kind == "before_dropout" else want.kept
        tolerance.assert_close(weights, shown, kind)
        assert not np.asarray(weights)[shown == 0].any(), "a weight that has to be exactly 0"
        tolerance.assert_close(lse, want.lse, "lse")


def coefficients(case: Case, dtype: str = "float64", *, lse: bool = True) -> tuple[Any, Any]:
    """A random linear functional of output and (if `lse`) lse, 0 where they are not finite.

    An empty row has no lse to differentiate. The values fit every dtype: nothing rounds them.
    """
    rng = np.random.default_rng(1)
    want = expected(case, cases.arrays(case, dtype))

    def draw(x: Any) -> Any:
        drawn = rng.standard_normal(x.shape).astype(ml_dtypes.bfloat16).astype(np.float64)
        return np.where(np.isfinite(x), drawn, 0.0)

    return draw(want.out), draw(want.lse) * lse


def weighted(parts: tuple[Any, Any], out: Any, lse: Any) -> Any:
    """The functional of JAX arrays."""
    total = jnp.zeros((), lse.dtype)
    for part, x in zip(parts, (out, lse), strict=True):
        x = jnp.where(part == 0, 0.0, x.astype(lse.dtype))
        total += (x * jnp.asarray(part, lse.dtype)).sum()
    return total


def scalar(case: Case, implementation: str, dtype: str = "float64") -> Callable[..., Any]:
    """The functional of a case as a function of differentiable and of other arrays."""
    run, parts = call(case, implementation, return_lse=True), coefficients(case, dtype)
    return lambda inside, others: weighted(parts, *run(inside | others))


def both(function: Callable[..., Any], argnums: Any = 0, *, has_aux: bool = False) -> Any:
    """Compiled: the value alone, then it and its gradients, which may be another program."""
    grads = jax.value_and_grad(function, argnums, has_aux=has_aux)
    return jax.jit(lambda *arguments: (function(*arguments), grads(*arguments)))


def split(arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays with gradients, and the others."""
    inside = {name: x for name, x in arrays.items() if name in DIFFERENTIABLE}
    return inside, {name: x for name, x in arrays.items() if name not in DIFFERENTIABLE}


def gradients(case: Case, implementation: str, dtype: str, entries: int | None = None) -> None:
    """Gradients of the functional are the gradients of the specification."""
    if declines(case, implementation, dtype):
        return
    arrays = cases.arrays(case, dtype)
    found = jax.jit(jax.grad(scalar(case, implementation, dtype)))(*split(arrays))
    for name, grads in finite_differences(case, dtype, entries).items():
        assert found[name].dtype == arrays[name].dtype
        grad = np.asarray(found[name])
        assert np.isfinite(grad.astype(np.float64)).all(), f"gradient of {name} is not finite"
        known = ~np.isnan(grads)
        tolerance.assert_gradients(grad[known], grads[known], f"gradient of {name}")


def finite_differences(case: Case, dtype: str, entries: int | None = None) -> dict[str, Any]:
    """Gradients of the functional of the specification, entry by entry; NaN: not computed.

    `entries` random ones per array, or all. Entries that are infinite (-inf in a bias) have
    gradient 0: a pair that is excluded stays so.
    """
    parts = coefficients(case, dtype)
    arrays = {
        name: x.astype(np.float64) if name in DIFFERENTIABLE else x
        for name, x in cases.arrays(case, dtype).items()
    }

    def of(found_output: reference.Output) -> float:
        return sum(
            float((part * np.where(part == 0, 0.0, x)).sum())
            for part, x in zip(parts, (found_output.out, found_output.lse), strict=True)
        )

    rng = np.random.default_rng(3)
    found = {}
    for name, x in split(arrays)[0].items():
        grads = np.full(x.shape, np.nan)
        places = list(np.ndindex(*x.shape))
        if entries is not None:
            places = [places[p] for p in rng.permutation(len(places))[:entries]]
        for place in places:
            if not np.isfinite(x[place]):
                grads[place] = 0.0
                continue
            sides = []
            for step in (tolerance.STEP, -tolerance.STEP):
                moved = x.copy()
                moved[place] += step
                sides.append(of(expected(case, arrays | {name: moved})))
            grads[place] = (sides[0] - sides[1]) / (2 * tolerance.STEP)
        found[name] = grads
    return found


def dead_keys(case: Case, arrays: dict[str, Any]) -> Any:
    """Keys that no query of their batch row may attend, `*B S`."""
    names = ["is_causal", "local_window_size", "mask", "segment_ids"]
    names += ["query_seq_lengths", "key_value_seq_lengths"]
    given = arrays | case.options
    conditions = {name: given[name] for name in names if name in given}
    allowed = reference.pairs(case.batch, case.N, case.T, case.S, **conditions)
    if "bias" in arrays:
        allowed &= np.broadcast_to(arrays["bias"] != -np.inf, allowed.shape)
    return ~allowed.any((-3, -2))


def kernel(case: Case, implementation: str, dtype: str, *, lse: bool) -> None:
    """Output, lse where it is read, and every gradient, of one compiled program.

    Gradients are those of `reference` in float64, which stand against the specification elsewhere.
    """
    if declines(case, implementation, dtype):
        return
    arrays = cases.arrays(case, dtype)
    want, parts = expected(case, arrays), coefficients(case, dtype, lse=lse)

    def of(implementation: str) -> Callable[..., Any]:
        run = call(case, implementation, return_lse=lse)

        def value(inside: dict[str, Any], others: dict[str, Any]) -> Any:
            found_output = run(inside | others)
            wide = accumulation_dtype(inside["query"].dtype)
            out, found = found_output if lse else (found_output, jnp.zeros(parts[1].shape, wide))
            return weighted(parts, out.astype(found.dtype), found), (out, found)

        return jax.jit(jax.grad(value, has_aux=True))

    found, (out, row_lse) = of(implementation)(*split(arrays))
    assert out.dtype == arrays["query"].dtype
    tolerance.assert_close(out, want.out, "output")
    assert not np.asarray(out)[want.out == 0].any(), "a row that has to be exactly 0"
    if lse:
        assert row_lse.dtype == "float32"
        tolerance.assert_close(row_lse, want.lse, "lse")
    inside, others = split(arrays)
    with jax.enable_x64(True):
        wide = {name: x.astype(np.float64) for name, x in inside.items()}
        grads = jax.tree.map(np.asarray, of("reference")(wide, others)[0])
    for name, grad in grads.items():
        assert found[name].dtype == arrays[name].dtype
        actual = np.asarray(found[name])
        assert np.isfinite(actual.astype(np.float64)).all(), f"gradient of {name} is not finite"
        tolerance.assert_gradients(actual, grad, f"gradient of {name}")


def poisoned_padding(case: Case, implementation: str, dtype: str, *, lse: bool = True) -> None:
    """Keys that nothing may attend change no bit of output or gradients, whatever they hold."""
    arrays = cases.arrays(case, dtype)
    dead = dead_keys(case, arrays)
    assert dead.any(), "a case with nothing to poison proves nothing"
    parts = coefficients(case, dtype, lse=lse)
    shown = implementation not in WITHOUT_WEIGHTS
    run = call(case, implementation, return_lse=lse, return_weights=shown)

    def value(inside: dict[str, Any], others: dict[str, Any]) -> Any:
        found_output = run(inside | others)
        if not lse:
            found_output = found_output, jnp.zeros(parts[1].shape, np.float32)
        return weighted(parts, found_output[0], found_output[-1]), found_output

    compiled = both(value, has_aux=True)
    (_, alone), ((_, found_output), clean) = compiled(*split(arrays))
    one = tuple(np.argwhere(dead)[0]) + (0,) * (arrays["key"].ndim - dead.ndim)
    # One of it leaves their sum finite, but not what it is multiplied with.
    huge = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    for poison, where in ((np.nan, dead), (np.inf, dead), (-np.inf, dead), (huge, one)):
        spoiled = dict(arrays)
        for name in ("key", "value"):
            spoiled[name] = arrays[name].copy()
            spoiled[name][where] = poison
        (_, spoiled_alone), ((_, spoiled_output), grads) = compiled(*split(spoiled))
        for x, y in zip((*spoiled_alone, *spoiled_output), (*alone, *found_output), strict=True):
            tolerance.assert_same(x, y, f"output, weights or lse {x.shape} with {poison}")
        for name, grad in grads.items():
            assert np.isfinite(grad.astype(np.float32)).all(), f"gradient of {name}, {poison}"
            tolerance.assert_same(grad, clean[name], f"gradient of {name} with {poison}")


def inputs_unchanged(case: Case, implementation: str) -> None:
    """A call leaves its arguments as they were."""
    if declines(case, implementation, "float32"):
        return
    arrays = cases.arrays(case, "float32")
    before = jax.tree.map(np.copy, arrays)
    shown = implementation not in WITHOUT_WEIGHTS
    jax.block_until_ready(call(case, implementation, return_weights=shown)(arrays))  # type: ignore[no-untyped-call]
    chex.assert_trees_all_equal(arrays, before, strict=True)
