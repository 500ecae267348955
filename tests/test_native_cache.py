"""The native kernels over caches: the same as plain XLA, in place, and what the handlers refuse."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxmha
from jaxmha import KVCache, Mask, PagedKVCache, Semantics
from jaxmha.cached_attention import attend_cache
from jaxmha.implementations.native import library
from jaxmha.quantized import quantize
from tests import conformance, tolerance
from tests.drawn import to_jax
from tests.test_cache import make

built = conformance.native_built
PARAMS, _ = make()  # only its extra positions and sinks are read: none
# batch rows, key heads, query heads of each, tokens, features of keys and values, slots of a page
SIZES = {
    "one token": (3, 2, 3, 1, 16, 16, 16),
    "one row": (2, 1, 1, 1, 32, 16, 5),
    "odd features": (2, 3, 2, 2, 5, 7, 3),
    "nine rows": (2, 1, 3, 3, 32, 32, 64),
    "many rows": (1, 2, 5, 17, 11, 19, 100),
}
MASKS = ("plain", "window", "padding", "array")


def filled(sizes: tuple[int, ...], dtype: str, lengths: Any, rng: Any, *, paged: bool) -> Any:
    """A cache with random numbers in the slots of tokens, and poison in all others."""
    B, K, _, _, H, h, page = sizes
    M = 211 // page + 1
    S = page * M
    shape = (B * M, K, page) if paged else (B, K, S)
    used = -(-lengths[:, None] // page)
    table = rng.permutation(B * M).reshape(B, M).astype(np.int32)
    dead = np.ones(shape[::2], bool)
    if paged:
        slots = np.arange(page)[None, None] + page * np.arange(M)[None, :, None]
        dead[table] = slots >= lengths[:, None, None]
    else:
        dead = np.arange(S)[None] >= lengths[:, None]
    table = np.where(np.arange(M)[None] < used, table, -1)
    parts: list[Any] = []
    scales: list[Any] = []
    for features in (H, h):
        x = rng.standard_normal((*shape, features)).astype(np.float32)
        if jnp.dtype(dtype).itemsize == 1 and paged:
            stored, scale = quantize(to_jax(x), jnp.dtype(dtype))
            parts.append(stored)
            scales.append(np.where(dead[:, None], np.nan, scale))
        else:
            x = np.where(dead[:, None, :, None], np.nan, x)
            parts.append(to_jax(x, dtype))
            scales.append(None)
    counts = to_jax(lengths, jnp.int32)
    key, value = parts
    if not paged:
        return KVCache(key, value, counts)
    return PagedKVCache(key, value, table, counts, scales[0], scales[1])


def both(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], cache: Any, mask: Mask, **options: Any
) -> tuple[Any, Any]:
    """Attention over a cache by the kernel and by plain XLA."""
    B, K, G, T, H, _, _ = sizes
    rng = np.random.default_rng(1)
    query = to_jax(rng.standard_normal((B, T, K * G, H)), jnp.float32)
    positions = to_jax((np.asarray(cache.lengths) - T)[:, None] + np.arange(T, dtype=np.int32))

    def run(query: Any, cache: Any) -> Any:
        semantics = Semantics(**options)
        return attend_cache(PARAMS, query, cache, positions, mask, semantics, block=64)

    lowered = jax.jit(run).lower(query, cache)
    assert "jaxmha_cpu_attend_cache" in lowered.as_text()
    native = lowered.compile()(query, cache)
    monkeypatch.setenv("JAXMHA_NATIVE", "0")
    return native, jax.jit(lambda query, cache: run(query, cache))(query, cache)


@built
@pytest.mark.slow_variants(
    "*", "!one token-plain-False", "!one token-window-True", "!odd features-padding-False",
    "!odd features-plain-True", "!many rows-window-False", "!many rows-array-True",
)  # fmt: skip
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", SIZES)
def test_as_plain_xla(
    monkeypatch: pytest.MonkeyPatch, name: str, mask: str, *, paged: bool
) -> None:
    sizes = SIZES[name]
    B, K, G, T, *_, page = sizes
    rng = np.random.default_rng(0)
    lengths = rng.integers(T + 3, 211, B)
    S = page * (211 // page + 1)
    if mask == "window" and not paged:
        lengths += 3 * S  # the buffer has wrapped around
    cache = filled(sizes, "float32", lengths, rng, paged=paged)
    masks = {
        "plain": Mask(),
        "window": Mask.window(7, None),
        "padding": Mask.padding(key_value=rng.random((B, S)) < 0.7),
        "array": Mask.dense(rng.random((B, K * G, T, S)) < 0.7),
    }
    cap = 1.3 if mask == "array" else None
    found, want = both(monkeypatch, sizes, cache, masks[mask], logits_soft_cap=cap)
    tolerance.assert_close(found, np.asarray(want, np.float64), factor=2)


@built
@pytest.mark.slow_variants("*", "!int8-one token", "!float8_e4m3fn-odd*", "!float8_e5m2-one token")
@pytest.mark.parametrize("name", ["one token", "odd features", "nine rows"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_stored_dtypes(monkeypatch: pytest.MonkeyPatch, dtype: str, name: str) -> None:
    sizes, rng = SIZES[name], np.random.default_rng(0)
    lengths = rng.integers(sizes[3] + 3, 211, sizes[0])
    cache = filled(sizes, dtype, lengths, rng, paged=True)
    found, want = both(monkeypatch, sizes, cache, Mask.window(90, None))
    tolerance.assert_close(found, np.asarray(want, np.float64), factor=8)


@built
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_number_of_float8(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Each is the only value that a row attends: 254 of them, infinities and NaN."""
    numbers = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).reshape(256, 1, 1, 1)
    cache = KVCache(jnp.zeros_like(numbers), to_jax(numbers), jnp.ones(256, np.int32))
    found, want = both(monkeypatch, (256, 1, 1, 1, 1, 1, 1), cache, Mask())
    np.testing.assert_array_equal(found, want)
    exact = numbers[..., 0].astype(np.float32)
    np.testing.assert_array_equal(np.asarray(found)[..., 0], exact)


@built
def test_writes_are_in_place() -> None:
    """Donated pages are those of the result; a token is written, and no page is copied."""
    params, x = make()
    for dtype in ("float32", "int8"):
        cache = PagedKVCache.empty(params, 3, 40, pages=30, page_size=4, dtype=dtype)
        step = jax.jit(jaxmha.decode_step, donate_argnums=2)
        text = step.lower(params, x[:, :1], cache).compile().as_text()
        assert text is not None
        assert text.count("jaxmha_cpu_write_cache") >= (2 if dtype == "float32" else 4)
        pools = {f"[{','.join(map(str, pool.shape))}]" for pool in (cache.key, cache.value)}
        made = [line.split(" = ", 1)[1] for line in text.splitlines() if " = " in line]
        whole = [line for line in made if any(pool in line.split(" ", 1)[0] for pool in pools)]
        assert not [line for line in whole if " copy(" in line or " fusion(" in line]


@pytest.mark.slow
@built
def test_exported_mapped_and_differentiated() -> None:
    params, x = make()
    cache = PagedKVCache.empty(params, 3, 12, pages=9, page_size=4)
    _, cache = jaxmha.extend(params, x[:, :5], cache)

    def step(x: Any) -> Any:
        return jaxmha.decode_step(params, x, cache)

    token = x[:, 5:6]
    want, longer = step(token)
    program: Any = export.export(jax.jit(step))(token)
    assert "@jaxmha_cpu_" not in program.mlir_module()
    tolerance.assert_close(program.call(token)[0], np.asarray(want, np.float64), factor=2)
    outs, caches = jax.vmap(step)(jnp.stack([token, -token]))
    tolerance.assert_close(outs[0], np.asarray(want, np.float64), factor=2)
    np.testing.assert_allclose(caches.key[0], longer.key, rtol=1e-6, atol=1e-6)
    along = jnp.ones_like(token)
    _, derivative = jax.jvp(lambda x: step(x)[0], (token,), (along,))
    ahead, behind = (step(token + h * along)[0] for h in (1e-2, -1e-2))
    np.testing.assert_allclose(derivative, (ahead - behind) / 2e-2, rtol=2e-2, atol=2e-3)


# Calls that no program of ours makes: what a handler is given, it checks.
INTEGERS = ("table", "lengths", "first", "pages", "slots", "sources", "targets")
STEP: dict[str, tuple[int, ...]] = {
    "rows": (2, 3, 4, 8), "key": (5, 3, 6, 8), "value": (5, 3, 6, 7), "key_scale": (5, 3, 6),
    "value_scale": (5, 3, 6), "table": (2, 4), "lengths": (2,), "first": (2,),
    "allowed": (2, 6, 1, 24),
}  # fmt: skip
RESULTS = ((2, 3, 4, 7), (2, 3, 4), (2, 3, 4))
WRITE: dict[str, tuple[int, ...]] = {
    "pool": (5, 3, 6, 8), "tokens": (2, 4, 3, 8), "pages": (2, 4), "slots": (2, 4),
    "sources": (2,), "targets": (2,),
}  # fmt: skip


def arrays(shapes: dict[str, tuple[int, ...]], fill: int = 0, dtypes: Any = None) -> list[Any]:
    usual = dict.fromkeys(INTEGERS, np.int32) | {"allowed": np.bool_} | (dtypes or {})
    return [
        np.full(shape, fill if name in INTEGERS else 0, usual.get(name, np.float32))
        for name, shape in shapes.items()
    ]


def call_step(
    shapes: dict[str, tuple[int, ...]], results: Any = RESULTS, tokens: int = 2, **more: Any
) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    attributes = {"soft_cap": np.float32(0), "tokens": np.int64(tokens), "left": np.int64(3)}
    call = jax.ffi.ffi_call(
        "jaxmha_cpu_attend_cache", [struct(shape, np.float32) for shape in results]
    )
    return jax.block_until_ready(call(*arrays(shapes, **more), **attributes))  # type: ignore[no-untyped-call]


def call_write(shapes: dict[str, tuple[int, ...]], **more: Any) -> Any:
    given = arrays(shapes, **more)
    like: Any = jax.ShapeDtypeStruct(given[0].shape, given[0].dtype)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("jaxmha_cpu_write_cache", like)
    return jax.block_until_ready(call(*given))  # type: ignore[no-untyped-call]


@built
def test_native_handlers_refuse_what_does_not_fit() -> None:
    assert library.unavailable() is None
    calls: list[Any] = []
    for call, shapes in ((call_step, STEP), (call_write, WRITE)):
        call(shapes)
        wrong = [
            (name, (*shape[:axis], 13, *shape[axis + 1 :]))
            for name, shape in shapes.items()
            for axis in range(len(shape))
            if (name, axis) not in (("table", 1), ("pool", 0), ("pool", 2))
        ]
        wrong += [(name, (1, *shape)) for name, shape in shapes.items()]
        wrong += [(name, shape[1:]) for name, shape in shapes.items()]
        calls += [partial(call, shapes | {name: shape}) for name, shape in wrong]
        calls += [partial(call, shapes, dtypes={name: np.uint16}) for name in shapes]
    for results, tokens in ((RESULTS, 3), (RESULTS, 0), (((2, 3, 4, 8), *RESULTS[1:]), 2)):
        calls.append(partial(call_step, STEP, results, tokens))
    for refused in calls:
        with pytest.raises(Exception, match="INVALID_ARGUMENT: jaxmha_cpu: "):
            refused()


@built
@pytest.mark.parametrize("fill", [-(2**31), -1, 5, 2**31 - 1])
def test_native_handlers_read_no_page_outside_the_pool(fill: int) -> None:
    """Pages, lengths and positions of any value: the addresses stay inside the buffers."""
    for found in (*call_step(STEP, fill=fill), call_write(WRITE, fill=fill)):
        assert np.isfinite(found).all()
