"""Every implementation against float64 on the device that is there: values and gradients."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmha
from experiments.benchmarks import gpu_cases, gpu_timing
from experiments.benchmarks.gpu_cases import Case

# Errors allowed, in units of half the last place of the dtype at the largest exact value: of the
# output, of gradients (which pass the dtype twice); and of lse, which is float32, relative to
# the larger of 1 and its largest value.
OUTPUT, GRADIENT, LSE = 3.0, 6.0, 2e-5
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}


def check(case: Case, implementation: str, dtype: str) -> dict[str, Any]:
    """Errors by name; `declined` or `failed` with the reason where there are none."""
    found: dict[str, Any] = {"case": case.name, "implementation": implementation, "dtype": dtype}
    try:
        return found | _errors(case, implementation, dtype)
    except Exception as error:  # noqa: BLE001  whatever a framework raises is a result
        return found | {"failed": gpu_timing.why(error)}


def _errors(case: Case, implementation: str, dtype: str) -> dict[str, Any]:
    given, mask = gpu_cases.arrays(case)
    given = {name: np.asarray(jnp.asarray(x, dtype), np.float32) for name, x in given.items()}
    heads = [jnp.asarray(given[name], dtype) for name in ("query", "key", "value")]
    bias = None if "bias" not in given else jnp.asarray(given["bias"], dtype)
    why: Any = None
    for lse in (True, False):
        explained = jaxmha.explain(
            heads[0],
            heads[1],
            heads[2],
            bias,
            mask,
            return_lse=lse,
            implementation=implementation,
        )
        why = explained.reasons[0][1]
        if why is None:
            break
    if why is not None:
        return {"declined": why}

    def run(heads: Any, bias: Any, cotangent: Any, lse_cotangent: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return jaxmha.dot_product_attention(
                q, k, v, bias, mask, return_lse=lse, implementation=implementation
            )

        returned, pull = jax.vjp(attend, *heads, bias)
        if not lse:
            return returned, None, pull(cotangent)
        # An empty row has no lse to differentiate.
        finite = jnp.isfinite(returned[1])
        return *returned, pull((cotangent, jnp.where(finite, lse_cotangent, 0)))

    cotangents = jnp.asarray(given["cotangent"], dtype), jnp.asarray(given["lse_cotangent"])
    program = jax.jit(run)
    out, row_lse, pulled = program(heads, bias, *cotangents)
    want = gpu_cases.expected(given, mask, lse=lse)
    errors = {"out": floors(out, want["out"], dtype)}
    for name, gradient in zip(("query", "key", "value", "bias"), pulled, strict=True):
        if gradient is not None:
            errors[f"d {name}"] = floors(gradient, want[name], dtype)
    if row_lse is not None:
        errors["lse"] = _lse_error(np.asarray(row_lse, np.float64), want["lse"])
    found: dict[str, Any] = {"lse": lse, "errors": errors}
    empty = np.asarray(out, np.float32)[want["out"] == 0]
    limits = {"out": OUTPUT, "lse": LSE}
    wrong = [f"{n} {e:.2g}" for n, e in errors.items() if not e <= limits.get(n, GRADIENT)]
    if empty.any():
        wrong.append("an empty row is not 0")
    wrong += _poisoned(program, given, mask, heads, bias, cotangents, (out, pulled), dtype)
    if wrong:
        found["failed"] = "; ".join(wrong)
    return found


def _poisoned(
    program: Any,
    given: Any,
    mask: Any,
    heads: Any,
    bias: Any,
    cotangents: Any,
    clean: Any,
    dtype: str,
) -> list[str]:
    """Keys that nothing may attend hold NaN: no bit may change, where none does from run to run."""
    B, T, N, _ = given["query"].shape
    S = given["key"].shape[1]
    allowed = np.broadcast_to(mask.to_array(T, S, np), (B, N, T, S))
    if "bias" in given:
        allowed = allowed & np.broadcast_to(given["bias"] != -np.inf, (B, N, T, S))
    dead = jnp.asarray(~allowed.any((1, 2)))[..., None, None]
    if not dead.any():
        return []
    spoiled = [heads[0], *(jnp.where(dead, jnp.nan, x).astype(x.dtype) for x in heads[1:])]
    before, again, dirty = (
        [np.asarray(x, np.float64) for x in jax.tree.leaves((found[0], found[-1]))]
        for found in (clean, program(heads, bias, *cotangents), program(spoiled, bias, *cotangents))
    )
    if all(map(np.array_equal, before, again)):
        same = all(map(np.array_equal, before, dirty))
    else:
        same = all(floors(x, y, dtype) <= 1 for x, y in zip(dirty, before, strict=True))
    return [] if same else ["what nothing attends has an influence"]


def floors(found: Any, want: Any, dtype: str) -> float:
    """Largest error in units of half the last place of the largest exact value."""
    largest = np.abs(want).max(initial=0.0)
    error = np.abs(np.asarray(found, np.float64) - want).max(initial=0.0)
    if not error:
        return 0.0
    return float(error / (max(largest, 1e-30) * EPS[dtype] / 2))


def _lse_error(found: Any, want: Any) -> float:
    finite = np.isfinite(want)
    if not np.array_equal(found[~finite], want[~finite]):
        return float("inf")
    largest = max(1.0, np.abs(want[finite]).max(initial=0.0))
    return float(np.abs(found[finite] - want[finite]).max(initial=0.0) / largest)


def run(
    rows: list[dict[str, Any]],
    cases: Sequence[Case],
    implementations: Sequence[str],
    dtypes: Sequence[str],
    *,
    late: Callable[[], bool],
    threads: int,
    done: Callable[[dict[str, Any]], None],
) -> None:
    """Adds all of them to rows, many compiling at once; `done` after each.

    What is not begun in time is counted as skipped, and made up for by another call.
    """

    def one(job: tuple[Case, str, str]) -> dict[str, Any]:
        case, implementation, dtype = job
        if late():
            kind = {"case": case.name, "implementation": implementation, "dtype": dtype}
            return {**kind, "skipped": "out of time"}
        return check(case, implementation, dtype)

    places = {
        (row["case"], row["implementation"], row["dtype"]): place for place, row in enumerate(rows)
    }
    missing = []
    for job in ((c, i, d) for d in dtypes for i in implementations for c in cases):
        place = places.setdefault((job[0].name, *job[1:]), len(places))
        if place >= len(rows) or "skipped" in rows[place]:
            missing.append((place, job))
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(one, [job for _, job in missing])
        for (place, _), row in zip(missing, found, strict=True):
            rows[place : place + 1] = [row]
            done(row)
