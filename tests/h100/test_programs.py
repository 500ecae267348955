"""Everyday programs compiled for an H100: as lean as those of `jax.nn` with cuDNN."""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxmha
from jaxmha import MHAParams
from jaxmha.implementations import probe
from jaxmha.implementations.base import EVERYTHING_LEAKS, Leaks
from tests import jit_cache
from tests.h100 import compiled, programs
from tests.h100.compiled import MIB, Program
from tests.h100.programs import ALONE, PROGRAMS, array

OPTIMISED = True
SPEC: Any = PartitionSpec
SHAPE: Any = jax.ShapeDtypeStruct
pytestmark = pytest.mark.slow


@cache
def four() -> jax.sharding.Mesh:
    """Four devices along the axis "data": those of two topologies are not the same."""
    return jax.sharding.Mesh(np.asarray(compiled.topology("1x1x4").devices), ("data",))


def over_four(x: Any, *axes: Any) -> Any:
    """An array like `x`, placed on four devices, which split the axes named "data"."""
    return SHAPE(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(four(), SPEC(*axes)))


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H100 as users have it: the settings of the other tests change the programs."""
    compiled.install(monkeypatch)
    compiled.topology()
    usual = {
        "jax_numpy_dtype_promotion": "standard",
        "jax_numpy_rank_promotion": "allow",
        "jax_default_matmul_precision": None,
        "jax_enable_compilation_cache": False,
    }
    before = {name: jax.config.values[name] for name in usual}
    for name, value in usual.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
    yield
    for name, value in before.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_lean_as_jax_nn(name: str) -> None:
    case = PROGRAMS[name]
    found = compiled.compiled(case.build(programs.ours), *case.arguments)
    peer = compiled.compiled(case.build(programs.theirs), *case.arguments)
    assert found.temporary <= 1.1 * peer.temporary + 2 * MIB
    assert found.kernels <= peer.kernels + 2
    written, written_by_peer = (sum(size for _, size in x.copies) for x in (found, peer))
    assert written <= 1.1 * written_by_peer + 2
    assert sum("cudnn" in call for call in found.calls) == len(peer.calls)
    assert found.waits == found.collectives == 0


@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str) -> None:
    case = ALONE[name]
    found = compiled.compiled(case.build(programs.ours), *case.arguments)
    assert found.temporary <= case.temporary * MIB
    assert found.kernels <= case.kernels
    assert any("cudnn" in call for call in found.calls)
    assert found.waits == 0


# Leaks that a probe finds of tokamax -> MiB of temporary arrays of a dense mask, a bias, and lengths. 16 each
# are zeroed keys and values, 128 a bias without -inf, and 8 a mask of bytes.
TOKAMAX = {Leaks(): (8, 160, 0), Leaks(1, 2): (24, 160, 16), EVERYTHING_LEAKS: (40, 160, 32)}


@pytest.mark.parametrize("leaks", TOKAMAX)
def test_tokamax_copies_what_leaks(leaks: Leaks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mask selects logits, values alone are zeroed; what is added, a bias, keeps out neither."""
    compiled.install_tokamax(monkeypatch)
    monkeypatch.setattr(probe, "leaks", lambda *_: leaks)
    jit_cache.forget()
    calls: list[tuple[Any, Any]] = [
        (programs.forward("mask"), array(2, 1, 2048, 2048, dtype=jnp.bool_)),
        (programs.forward("bias"), array(1, 16, 2048, 2048)),
        (programs.forward("key_value_seq_lengths"), programs.LENGTHS),
    ]
    for (build, more), most in zip(calls, TOKAMAX[leaks], strict=True):
        attend = partial(programs.ours, implementation="tokamax")
        found = compiled.compiled(build(attend), *programs.heads(), more)
        assert found.calls == ["mosaic_gpu_v2"]
        assert found.waits == 0
        assert found.temporary <= (most + 0.1) * MIB
        assert found.kernels <= 7


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("T", [7, 197])
def test_tokamax_takes_dense_arrays_of_odd_sizes(
    name: str, T: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mosaic loads whole tiles of a bias or mask, and refuses other sizes, in gradients too."""
    compiled.install_tokamax(monkeypatch)
    dtype = jnp.bool_ if name == "mask" else jnp.bfloat16
    query, key = (array(2, size, 4, 64) for size in (T, 131))
    build = programs.gradient(name, is_causal=True)
    attend = partial(programs.ours, implementation="tokamax")
    dense = array(1, 4, T, 131, dtype=dtype)
    found = compiled.compiled(build(attend), query, key, key, query, dense)
    assert set(found.calls) == {"mosaic_gpu_v2"}


def step_of(cache: Any, E: int, *shape: int, **options: Any) -> Program:
    """A decoding step of 16 query and 4 key/value heads; `cache` makes the cache of parameters."""
    params = jax.eval_shape(
        lambda: jaxmha.init_params(
            jax.random.key(0), num_heads=16, num_kv_heads=4, features=E, dtype=jnp.bfloat16
        )
    )
    given = jax.eval_shape(lambda: cache(params))
    step = partial(jaxmha.decode_step, **options)
    return compiled.compiled(step, params, array(*shape, E), given, donate=(2,))


@pytest.mark.parametrize(
    ("B", "S", "T"), [(1, 2048, 1), (64, 8192, 1), (1, 2048, 4), (64, 8192, 16)]
)
def test_a_decoding_step_waits_for_nothing(B: int, S: int, T: int) -> None:
    """Past and own tokens are a call each where there are several; the cache is written in place."""
    E = 2048
    found = step_of(lambda params: jaxmha.KVCache.empty(params, B, S), E, B, T)
    assert found.kernels <= 20
    assert found.waits == 0
    assert found.temporary <= 3 * MIB + 16 * B * T * E  # 8 arrays of features, and no scores
    assert [call for call in found.calls if "cudnn" in call] == ["__cudnn$fmhaSoftmax"] * min(T, 2)
    assert not [size for kind, size in found.copies if kind == "copy"]


WINDOWED: dict[str, Any] = {
    "slots": lambda params: jaxmha.KVCache.empty(params, 64, 32768),
    "pages": lambda params: jaxmha.PagedKVCache.empty(params, 64, 32768, pages=32768, page_size=64),
    "few pages": lambda params: jaxmha.PagedKVCache.empty(params, 64, 32768, pages=3000, page_size=64),
    "int8": lambda params: jaxmha.PagedKVCache.empty(params, 64, 32768, pages=3000, dtype="int8"),
}  # fmt: skip


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("cache", ["slots", "pages", "few pages"])
def test_a_windowed_step_reads_the_window(cache: str, T: int) -> None:
    """32768 slots, of which a copy of 1024 is 64 MiB for keys and as much for values."""
    E, window = 2048, jaxmha.Mask.window(1023, 0)
    found = step_of(WINDOWED[cache], E, 64, T, mask=window)
    assert [call for call in found.calls if "cudnn" in call] == ["__cudnn$fmhaSoftmax"]
    assert found.waits == 0
    assert found.temporary <= (2 * 64 + 4 * T) * MIB
    assert not [size for kind, size in found.copies if kind == "copy"]


@pytest.mark.parametrize("cache", ["slots", "few pages", "int8"])
def test_so_does_a_step_without_cudnn(cache: str) -> None:
    """With a soft cap, which it does not have; and over numbers with scales."""
    window, cap = jaxmha.Mask.window(1023, 0), jaxmha.Semantics(logits_soft_cap=30.0)
    found = step_of(WINDOWED[cache], 2048, 64, 4, mask=window, semantics=cap)
    assert not any("cudnn" in call for call in found.calls)
    assert found.waits == 0
    assert found.temporary <= (2 * 64 + 64) * MIB
    assert not [size for kind, size in found.copies if kind == "copy"]


@pytest.mark.parametrize("T", [1, 8])
@pytest.mark.parametrize("pages", [8192, 1000])
def test_a_step_reads_pages_where_they_lie(pages: int, T: int) -> None:
    """Calls of cuDNN over the table, and no copy of the pages, which are written in place."""
    E, B = 512, 64

    def cache(params: MHAParams) -> jaxmha.PagedKVCache:
        return jaxmha.PagedKVCache.empty(params, B, 8192, pages=pages, page_size=64)

    found = step_of(cache, E, B, T)
    assert [call for call in found.calls if "cudnn" in call] == ["__cudnn$fmhaSoftmax"] * min(T, 2)
    assert found.waits == 0
    # A page of keys and of values for each of B copies on write, and 8 arrays of features.
    assert found.temporary <= 10 * MIB + 16 * B * T * E
    assert not [size for kind, size in found.copies if kind == "copy" and size > 10]
    assert found.kernels <= 40


# The most collectives of a step, by the cache and by what four devices split. All of them have the same
# pages, so rows exchange their tokens, free pages and copies on write. Heads sum the output projection.
COLLECTIVES = {
    ("slots", "rows"): 0,
    ("slots", "heads"): 1,
    ("pages", "rows"): 6,
    ("pages", "heads"): 1,
}


@pytest.mark.parametrize("T", [1, 8])
@pytest.mark.parametrize(("kind", "over"), COLLECTIVES)
def test_a_sharded_step_reads_the_cache_where_it_lies(kind: str, over: str, T: int) -> None:
    E, B = 512, 64
    batch, heads = ("data", None) if over == "rows" else (None, "data")
    params = jax.eval_shape(
        lambda: jaxmha.init_params(jax.random.key(0), num_heads=8, features=E, dtype=jnp.bfloat16)
    )

    def empty() -> Any:
        if kind == "slots":
            return jaxmha.KVCache.empty(params, B, 1024)
        return jaxmha.PagedKVCache.empty(params, B, 1024, pages=256, page_size=64)

    cache = jax.eval_shape(empty)
    first = batch if kind == "slots" else None  # every device has all pages
    placed = {name: over_four(getattr(cache, name), first, heads) for name in ("key", "value")}
    rows = {
        name: over_four(getattr(cache, name), batch)
        for name in ("table", "lengths")
        if hasattr(cache, name)
    }
    found = compiled.compiled(
        jaxmha.decode_step,
        params,
        over_four(array(B, T, E), batch),
        cache._replace(**placed, **rows),
        sharding=over_four(array()).sharding,
    )
    assert [call for call in found.calls if "cudnn" in call] == ["__cudnn$fmhaSoftmax"] * min(T, 2)
    assert found.collectives <= COLLECTIVES[kind, over]


@pytest.mark.parametrize("manual", [{"data"}, {"data", "tensor"}])
def test_the_gradient_of_a_shard_map_compiles(manual: set[str]) -> None:
    """XLA crashes on kernels that lie in a function of their own: it would end this process. And JAX's
    own rules for cuDNN fail where only some mesh axes are manual."""
    devices = np.asarray(compiled.topology("1x1x4").devices).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
    rows, every = (jax.sharding.NamedSharding(mesh, SPEC(x)) for x in ("data", None))
    params = jax.eval_shape(
        lambda: jaxmha.init_params(jax.random.key(0), num_heads=4, features=256, dtype=jnp.bfloat16)
    )
    x = SHAPE((8, 256, 256), jnp.bfloat16, sharding=rows)
    layer = jax.shard_map(
        partial(jaxmha.multi_head_attention, is_causal=True),
        mesh=mesh,
        in_specs=(SPEC(), SPEC("data")),
        out_specs=SPEC("data"),
        axis_names=manual,
    )

    def value(params: Any, x: Any) -> Any:
        return layer(params, x).astype(jnp.float32).sum()

    found = compiled.compiled(jax.grad(value, (0, 1)), params, x, sharding=every)
    assert sum("cudnn" in call for call in found.calls) == 2
    assert found.collectives == 1  # the sum of the gradients of the parameters


@pytest.mark.parametrize("K", [16, 2, 1])
@pytest.mark.parametrize("names", [("data", None), (None, "data")])
def test_sharded_heads_are_attended_where_they_are(names: tuple[Any, Any], K: int) -> None:
    """Plain sharded jit over the batch or the heads of four devices; few key heads are everywhere."""
    arrays = [
        over_four(x, names[0], None, names[1] if x.shape[2] > 4 else None)
        for x in programs.heads(8, K=K)
    ]

    def value(*arrays: Any) -> Any:
        return jaxmha.dot_product_attention(*arrays, is_causal=True).astype(jnp.float32).sum()

    found = compiled.compiled(jax.grad(value, (0, 1, 2)), *arrays)
    assert sum("cudnn" in call for call in found.calls) == 2
    assert found.collectives == (K < 4 and names[1] is not None)  # the sum of their gradients


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("K", [16, 4])
@pytest.mark.parametrize("names", [("data", None), (None, "data")])
def test_sharded_heads_of_blocked_too(names: tuple[Any, Any], K: int, dtype: str) -> None:
    heads = (SHAPE(x.shape, jnp.dtype(dtype)) for x in programs.heads(8, 1024, K=K))
    arrays = [over_four(x, names[0], None, names[1]) for x in heads]

    def out(*arrays: Any) -> Any:
        return jaxmha.dot_product_attention(*arrays, is_causal=True, logits_soft_cap=30.0)

    def value(*arrays: Any) -> Any:
        return out(*arrays).astype(jnp.float32).sum()

    for function in (out, jax.grad(value, (0, 1, 2))):
        found = compiled.compiled(function, *arrays)
        assert not any("cudnn" in call for call in found.calls)
        assert found.collectives == 0


@pytest.mark.parametrize("names", [("data", None), (None, "data")])
def test_sharded_padding_too(names: tuple[Any, Any]) -> None:
    """A table of valid keys counts the batch rows of its own device."""
    heads = [over_four(x, names[0], None, names[1]) for x in programs.heads(8)]
    valid = over_four(SHAPE((8, 2048), jnp.bool_), names[0])
    found = compiled.compiled(lambda *x: programs.ours(*x[:3], padding=x[3]), *heads, valid)
    assert sum("cudnn" in call for call in found.calls) == 1
    assert found.collectives == 0
    assert found.temporary <= MIB


@pytest.mark.parametrize("names", [("data", None), (None, "data")])
def test_sharded_packed_sequences_too(names: tuple[Any, Any]) -> None:
    arrays = [over_four(x, names[0], None, names[1]) for x in programs.heads(8, K=4)]

    def value(q: Any, k: Any, v: Any) -> Any:
        mask = jaxmha.Mask.segments(query_ids=IDS, key_value_ids=IDS)
        out = jaxmha.dot_product_attention(q, k, v, mask=mask, is_causal=True)
        return out.astype(jnp.float32).sum()

    found = compiled.compiled(jax.grad(value, (0, 1, 2)), *arrays)
    assert sum("cudnn" in call for call in found.calls) == 2
    assert found.collectives == 0


IDS = np.repeat(np.arange(8), 256)[None]
# Ways to say that sequences are packed, of a traced array.
PACKED: dict[str, Any] = {
    "lengths": lambda x: jaxmha.Mask.packed(x[:, :7], size=2048),
    "ids of NumPy": lambda _: jaxmha.Mask.segments(query_ids=IDS, key_value_ids=IDS),
    "promised ids": lambda x: jaxmha.Mask.segments(query_ids=x, key_value_ids=x, max_segments=8),
}


@pytest.mark.parametrize(("K", "causal"), [(16, True), (4, True), (4, False)])
@pytest.mark.parametrize("given", PACKED)
def test_packed_sequences(given: str, K: int, causal: bool) -> None:
    """No array of T x S, and besides cuDNN only what finds the offsets."""
    T, stated = 2048, array(2, 2048, dtype=jnp.int32)
    mask = PACKED[given]

    def attend(q: Any, k: Any, v: Any, stated: Any) -> Any:
        return jaxmha.dot_product_attention(q, k, v, mask=mask(stated), is_causal=causal)

    def both(q: Any, k: Any, v: Any, stated: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, stated), q, k, v)
        return out, pull(d_out)

    heads = programs.heads(T=T, K=K)
    for B in (1, 2):
        rows = [array(B, *x.shape[1:], dtype=x.dtype) for x in (*heads, stated)]
        forward = compiled.compiled(attend, *rows)
        assert sum("cudnn" in call for call in forward.calls) == 1
        assert forward.kernels <= 4
        assert forward.temporary <= MIB
    gradient = compiled.compiled(both, *heads, stated, programs.OUT)
    assert sum("cudnn" in call for call in gradient.calls) == 2
    assert gradient.waits == forward.waits == 0
    assert max((size for _, size in gradient.copies), default=0) < T * T / MIB


TRANSFORMED: dict[str, Any] = {
    "vmap(grad)": lambda f: jax.vmap(jax.grad(f, (0, 1, 2))),
    "vmap of one operand": lambda f: jax.vmap(f, in_axes=(0, None, None)),
    "vmap(grad) of one operand": lambda f: jax.vmap(jax.grad(f, (0, 1)), in_axes=(0, None, None)),
    "jacobian": lambda f: jax.jacobian(lambda *x: jnp.stack([f(*x), 2 * f(*x)]), (0, 1, 2)),
}


@pytest.mark.parametrize("kind", ["full", "packed", "lengths", "padding"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(name: str, kind: str) -> None:
    T = 256

    def value(q: Any, k: Any, v: Any) -> Any:
        mask = jaxmha.Mask()
        if kind == "packed":
            mask = jaxmha.Mask.packed(np.array([[100, 30]]), size=T)
        if kind == "lengths":
            mask = jaxmha.Mask.lengths(key_value=np.array([T, 30]))
        if kind == "padding":
            mask = jaxmha.Mask.padding(key_value=np.arange(T)[None] >= np.array([[30], [0]]))
        out = jaxmha.dot_product_attention(q, k, v, mask=mask, is_causal=kind != "padding")
        return out.astype(jnp.float32).sum()

    heads = list(programs.heads(T=T, N=4, K=2, H=64))
    for place, x in enumerate(heads):
        if name.startswith("vmap") and (place == 0 or "one operand" not in name):
            heads[place] = array(3, *x.shape)
    found = compiled.compiled(TRANSFORMED[name](value), *heads)
    assert any("cudnn" in call for call in found.calls)
    assert found.waits == 0
