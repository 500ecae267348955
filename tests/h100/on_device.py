"""Every implementation against float64 on the device at hand: output, lse, gradients, and NaN in keys
that nothing attends."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import jaxmha
from jaxmha import Mask
from jaxmha.bench.worker import reason
from tests import tolerance

B, N = 2, 4
# Errors allowed, in rounding floors (see `tests.tolerance`) of the dtype: of the output, of gradients,
# which pass the dtype twice, and of lse, which is float32.
OUTPUT, GRADIENT, LSE = 3.0, 6.0, 335.0
# One program runs at a time: XLA ends the process where a thread loads a program while another records a
# CUDA graph on the same stream (jaxlib 0.11.2: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED).
DEVICE = Lock()
Arrays = dict[str, Any]
Row = dict[str, Any]


class Call(NamedTuple):
    """One call of attention.

    Attributes:
      name: for the report. Sizes as everywhere; B and N are the same in all calls.
      bias: axes of a bias, letters of BNTS or 1; `excludes`: some entries are -inf.
      shift: added to every logit by the bias (large and negative: lse is far below 0).
    """

    name: str
    mask: Mask = Mask()
    T: int = 128
    S: int = 128
    K: int = 2
    H: int = 64
    h: int = 64
    bias: str | None = None
    excludes: bool = False
    shift: float = 0.0


def _lengths(*lengths: int, query: tuple[int, ...] | None = None) -> Mask:
    given = None if query is None else np.asarray(query, np.int32)
    return Mask.lengths(key_value=np.asarray(lengths, np.int32), query=given)


def _drawn(*shape: int) -> NDArray[np.float64]:
    return np.random.default_rng(1).random(shape)


CAUSAL = Mask.causal()
LEFT = Mask.padding(key_value=np.arange(128) >= np.asarray([[42], [1]]))
HOLES = Mask.padding(key_value=_drawn(B, 128) < 0.6)
DENSE = Mask.dense((_drawn(B, 1, 128, 128) < 0.5) & (np.arange(128) > 0)[:, None])
ODD = Mask.dense(_drawn(B, 1, 77, 93) < 0.5)
IDS = np.sort((4 * _drawn(2, B, 128)).astype(np.int32), -1)

CALLS: tuple[Call, ...] = (
    Call("full"),
    Call("causal", CAUSAL),
    Call("causal, more keys", CAUSAL, S=320),
    Call("causal, bottom-right", Mask.causal(64), T=96, S=160),
    Call("causal, negative offset", Mask.causal(-17)),
    Call("window, left", Mask.window(31, 0)),
    Call("window, both sides", Mask.window(31, 9)),
    Call("window and lengths", Mask.window(9, 0) & _lengths(32, 96), T=160, S=96),
    Call("lengths", _lengths(42, 128)),
    Call("lengths, causal", CAUSAL & _lengths(42, 128)),
    Call("no keys", _lengths(0, 64, query=(128, 64))),
    Call("left padding", LEFT),
    Call("left padding, causal", CAUSAL & LEFT),
    Call("padding with holes", HOLES),
    Call("padding with holes, one query", HOLES, T=1),
    Call("padding with holes, causal", CAUSAL & HOLES),
    Call("dense mask, empty rows", DENSE),
    Call("segments", Mask.segments(query_ids=IDS[0], key_value_ids=IDS[1])),
    Call("packed, causal", CAUSAL & Mask.packed(np.asarray([[50, 0, 61], [128, 0, 0]]), size=128)),
    Call("dense mask, causal", CAUSAL & DENSE),
    Call("dense mask, odd sizes", ODD, T=77, S=93),
    Call("bias", bias="BNTS"),
    Call("bias of heads", bias="1NTS"),
    Call("bias of keys", bias="111S"),
    Call("bias of odd sizes, causal", CAUSAL, T=77, S=93, bias="1NTS"),
    Call("bias with -inf", bias="B1TS", excludes=True),
    Call("bias at 64 modulo 128", CAUSAL, T=192, S=192, bias="1NTS"),
    Call("lse far below 0", T=192, S=192, bias="1NTS", shift=-200.0),
    Call("multi-head", K=4),
    Call("multi-query", K=1),
    Call("H 72", H=72, h=72),
    Call("H 80, padding, causal", CAUSAL & HOLES, H=80, h=80),
    Call("H 128", H=128, h=128),
    Call("H 256", CAUSAL, H=256, h=256),
    Call("h is not H", CAUSAL, H=96, h=64),
    Call("T 77", T=77, S=77),
    Call("T 197, causal", CAUSAL, T=197, S=197),
    Call("T 333, S 1023", T=333, S=1023),
    Call("one query", _lengths(111, 333), T=1, S=333),
    Call("few queries of groups", _lengths(111, 333, query=(7, 3)), T=7, S=333),
    Call("one key", S=1),
)  # fmt: skip


def arrays(call: Call, dtype: str) -> tuple[Arrays, Arrays]:
    """Query, key, value and bias, and cotangents of output and lse, rounded to the dtype, in float64."""
    rng = np.random.default_rng([1, *call.name.encode()])
    sizes = {"B": B, "N": N, "T": call.T, "S": call.S, "1": 1}

    def normal(*shape: int) -> Any:
        drawn = rng.standard_normal(shape, np.float32)
        return np.asarray(jnp.asarray(drawn, dtype)).astype(np.float64)

    heads = {
        "query": normal(B, call.T, N, call.H),
        "key": normal(B, call.S, call.K, call.H),
        "value": normal(B, call.S, call.K, call.h),
    }
    if call.bias is not None:
        bias = normal(*(sizes[axis] for axis in call.bias)) + call.shift
        if call.excludes:
            bias[rng.random(bias.shape) < 0.4] = -np.inf
        heads["bias"] = np.asarray(jnp.asarray(bias, dtype)).astype(np.float64)
    return heads, {"out": normal(B, call.T, N, call.h), "lse": normal(B, N, call.T)}


def program(call: Call, implementation: str, *, lse: bool) -> Callable[[Arrays, Arrays], Arrays]:
    """A function of heads and cotangents that returns output, lse and gradients, by name."""

    def run(heads: Arrays, cotangents: Arrays) -> Arrays:
        def attend(heads: Arrays) -> Any:
            options: Any = {"return_lse": lse, "implementation": implementation}
            out = jaxmha.dot_product_attention(**heads, mask=call.mask, **options)
            return dict(zip(("out", "lse"), out if lse else (out,), strict=False))

        found, pull = jax.vjp(attend, heads)
        given = {name: cotangents[name].astype(x.dtype) for name, x in found.items()}
        if lse:  # an empty row has no lse to differentiate
            given["lse"] = jnp.where(jnp.isfinite(found["lse"]), given["lse"], 0)
        (gradients,) = pull(given)
        return {**found, **{f"d {name}": x for name, x in gradients.items()}}

    return run


def expected(call: Call, heads: Arrays, cotangents: Arrays, *, lse: bool) -> Arrays:
    """The same of the reference in float64, on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        found = jax.jit(program(call, "reference", lse=lse))(heads, cotangents)
        return {name: np.asarray(x) for name, x in found.items()}


def bound(name: str) -> float:
    """The error that is allowed of an array: `out`, `lse`, or a gradient."""
    return {"out": OUTPUT, "lse": LSE}.get(name, GRADIENT)


def check(call: Call, implementation: str, dtype: str) -> Row:
    """Errors by name; `declined` or `failed` with the reason where there are none."""
    found: Row = {"case": call.name, "implementation": implementation, "dtype": dtype}
    try:
        return found | _errors(call, implementation, dtype)
    except Exception as error:  # noqa: BLE001  whatever a framework raises is a result
        return found | {"failed": reason(error)}


def _errors(call: Call, implementation: str, dtype: str) -> Row:
    with DEVICE:
        exact, cotangents = arrays(call, dtype)
        heads: Arrays = {name: jnp.asarray(x, dtype) for name, x in exact.items()}
        given = {
            "out": jnp.asarray(cotangents["out"], dtype), "lse": jnp.float32(cotangents["lse"])
        }  # fmt: skip
        why: str | None = None
        for lse in (True, False):
            options: Any = {"return_lse": lse, "implementation": implementation}
            why = jaxmha.explain(**heads, mask=call.mask, **options).reasons[0][1]
            if why is None:
                break
    if why is not None:
        return {"declined": why}
    run = jax.jit(program(call, implementation, lse=lse)).lower(heads, given).compile()
    want = expected(call, exact, cotangents, lse=lse)
    with DEVICE:
        found = run(heads, given)
        errors = {name: tolerance.error(x, want[name]) for name, x in found.items()}
        wrong = [f"{n} {e:.2g}" for n, e in errors.items() if not e <= bound(n)]
        if np.asarray(found["out"], np.float32)[want["out"] == 0].any():
            wrong.append("an empty row is not 0")
        wrong += _poisoned(call, run, heads, given, found, dtype)
    return {"lse": lse, "errors": errors} | ({"failed": "; ".join(wrong)} if wrong else {})


def _poisoned(call: Call, run: Any, heads: Arrays, given: Arrays, clean: Arrays, dtype: str) -> Any:
    """Keys that nothing may attend hold NaN: no bit may change, where none does from run to run."""
    allowed = np.broadcast_to(
        np.asarray(call.mask.to_array(call.T, call.S, np)), (B, N, call.T, call.S)
    )
    if "bias" in heads:
        allowed = allowed & (np.asarray(heads["bias"], np.float32) != -np.inf)
    dead = jnp.asarray(~allowed.any((1, 2)))[..., None, None]
    if not dead.any():
        return []
    spoiled = {
        name: jnp.where(dead, jnp.nan, heads[name]).astype(dtype) for name in ("key", "value")
    }
    before, again, dirty = (
        [np.asarray(found[name], np.float64) for name in found if name != "lse"]
        for found in (clean, run(heads, given), run(heads | spoiled, given))
    )
    if all(map(np.array_equal, before, again)):
        same = all(map(np.array_equal, before, dirty))
    else:
        same = all(tolerance.error(x, y, dtype) <= 1 for x, y in zip(dirty, before, strict=True))
    return [] if same else ["keys that nothing attends have an influence"]


def run(
    rows: list[Row],
    calls: Sequence[Call],
    implementations: Sequence[str],
    dtypes: Sequence[str],
    *,
    late: Callable[[], bool],
    threads: int,
    done: Callable[[], None],
) -> None:
    """Adds all of them to rows, many compiling at once, and one running; `done` after each.

    A check that does not begin in time counts as skipped, and another call makes up for it.
    """

    def one(job: tuple[Call, str, str]) -> Row:
        call, implementation, dtype = job
        if late():
            kind = {"case": call.name, "implementation": implementation, "dtype": dtype}
            return {**kind, "skipped": "out of time"}
        return check(call, implementation, dtype)

    kept = {(row["case"], row["implementation"], row["dtype"]): row for row in rows}
    jobs = [(c, i, d) for d in dtypes for i in implementations for c in calls]
    missing = [
        job for job in jobs if "skipped" in kept.get((job[0].name, *job[1:]), {"skipped": 1})
    ]
    with ThreadPoolExecutor(threads) as pool:
        for (call, *rest), row in zip(missing, pool.map(one, missing), strict=True):
            kept[call.name, *rest] = row  # type: ignore[index]
            rows[:] = kept.values()
            done()
