"""Which implementation runs: platforms, trials of kernels, and `explain`."""

import contextlib
import json
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private
from typer.testing import CliRunner

import jaxmha
from experiments.scaling import workers
from jaxmha import Mask, implementations
from jaxmha.cli.app import app
from jaxmha.implementations import KERNELS, UnsupportedError, platforms, probe, reference
from jaxmha.implementations.base import Leaks
from jaxmha.implementations.fused import cudnn, cudnn_cached
from jaxmha.implementations.probe_cases import FEW, Kind
from tests import conformance, cudnn_contract
from tests.sharding.probing import probed

PADDED = Mask.padding(key_value=np.ones((2, 1024), bool))
WINDOW = Mask.window(3, None)


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype)


HALF = struct(2, 1024, 8, 128)


def chosen(*, platform: str = "h200", like: Any = HALF, **options: Any) -> str | None:
    return jaxmha.explain(like, like, like, platform=platform, **options).chosen


def reason(name: str, *, platform: str = "h200", like: Any = HALF, **options: Any) -> str:
    found = jaxmha.explain(like, like, like, platform=platform, implementation=name, **options)
    assert found.chosen is None
    return found.reasons[0][1] or ""


@pytest.mark.parametrize("device", ["h200", "H100", "gpu", "cuda", "a100", "b200"])
def test_gpus_run_cudnn_in_half_precision(device: str) -> None:
    assert chosen(platform=device) == "cudnn"
    assert chosen(platform=device, like=struct(2, 1024, 8, 128, dtype=jnp.float32)) == "blocked"


@pytest.mark.parametrize("device", ["rocm", "t4"])
def test_others_run_plain_xla(device: str) -> None:
    assert chosen(platform=device) == "blocked"


def test_cpus_run_the_native_kernels_where_they_are_built() -> None:
    built = not conformance.ABSENT and implementations.NATIVE_FIRST
    assert chosen(platform="cpu") == ("native" if built else "blocked")
    assert chosen(platform="cpu", implementation=["blocked", "native"]) == "blocked"


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"key_value_seq_lengths": struct(2, dtype=jnp.int32)},
        {"mask": PADDED},
        {"mask": PADDED, "is_causal": True},
        {"mask": PADDED, "is_causal": True, "scale": 1e-9},
        {"mask": PADDED, "is_causal": True, "like": struct(2, 1024, 8, 256)},
        {"mask": struct(2, 1, 1, 1024, dtype=jnp.bool_)},
        {"mask": Mask.causal(7)},
        {"local_window_size": (128, 0)},
        {"bias": struct(1, 8, 1024, 1024)},
        {"fully_masked": "mean"},
        {"return_lse": True},
    ],
    ids=lambda options: " ".join(options),
)
def test_cudnn_takes(options: dict[str, Any]) -> None:
    assert chosen(**options) == "cudnn"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"like": struct(2, 64, 8, 128, dtype=jnp.float32)}, "got float32"),
        ({"like": struct(2, 64, 8, 264)}, "at most 256"),
        ({"like": struct(2, 64, 8, 136), "platform": "a100"}, "at most 128"),
        ({"like": struct(2, 64, 8, 264), "platform": "b200"}, "at most 256"),
        ({"platform": "t4"}, "capability 8.0 or higher, got t4"),
        ({"platform": "tpu"}, "got tpu"),
        ({"logits_soft_cap": 3.0}, "soft cap"),
        ({"return_weights": True}, "never materialised"),
        ({"dropout_rate": 0.1, "dropout_key": struct(2, dtype=jnp.uint32)}, "dropout"),
        ({"segment_ids": struct(2, 1024, dtype=jnp.int32)}, "offsets"),
        ({"mask": Mask.causal(np.asarray([1, 2]))}, "Python integer"),
        ({"mask": WINDOW}, "right side"),
        ({"bias": struct(1, 8, 1024, 1024), "return_lse": True}, "to a bias"),
        (
            {"like": struct(2, 64, 8, 64, dtype=jnp.float16), "bias": struct(1, 8, 64, 64)},
            "far below",
        ),
        (
            {
                "like": struct(2, 1024, 8, 64, dtype=jnp.float16),
                "mask": PADDED,
                "is_causal": True,
                "scale": 1e-9,
            },
            "far below",
        ),
        ({"softmax_dtype": jnp.bfloat16}, "softmax_dtype"),
        ({"like": struct(2, 0, 8, 64)}, "at least 1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_cudnn_says_why_not(options: dict[str, Any], why: str) -> None:
    assert why in reason("cudnn", **options)


def test_named_implementations_raise_the_reason() -> None:
    x = jnp.ones((1, 8, 2, 8))
    with pytest.raises(UnsupportedError, match="cuDNN takes bfloat16 and float16, got float32"):
        jaxmha.dot_product_attention(x, x, x, implementation="cudnn")
    half = x.astype(jnp.bfloat16)
    with pytest.raises(UnsupportedError, match="runs on TPU, not on cpu"):
        jaxmha.dot_product_attention(half, half, half, implementation=["splash"])


def test_tpus_run_splash_from_its_tile_on() -> None:
    few = struct(2, 511, 8, 128, dtype=jnp.bfloat16)
    assert chosen(platform="tpu") == "splash"
    assert chosen(platform="tpu", like=few) == "blocked"
    assert chosen(platform="tpu", like=few, implementation=["splash", "blocked"]) == "splash"
    assert chosen(platform="tpu", like=struct(2, 1024, 8, 128, dtype=jnp.float32)) == "blocked"


def test_packed_sequences_run_on_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = struct(2, 1024, dtype=jnp.int32)
    packed = Mask.packed(np.array([[5, 700]], np.int32), size=1024)
    assert chosen(mask=packed, is_causal=True) == "cudnn"
    assert chosen(mask=packed, platform="b200") == "cudnn"
    assert chosen(mask=packed, platform="a100") == "blocked"
    assert chosen(segment_ids=ids) == "blocked"
    monkeypatch.setattr(implementations.tokamax, "find_spec", lambda name: object())
    with jax.numpy_dtype_promotion("standard"):
        assert chosen(segment_ids=ids) == "tokamax"
        assert "1073741824 pairs" in reason(
            "tokamax", like=struct(1, 2**16, 8, 128, dtype=jnp.bfloat16),
            segment_ids=struct(1, 2**16, dtype=jnp.int32),
        )  # fmt: skip


def test_biases_go_to_tokamax_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations.tokamax, "find_spec", lambda name: object())
    bias = struct(1, 8, 1024, 1024)
    with jax.numpy_dtype_promotion("standard"):
        assert chosen(bias=bias) == "tokamax"
        assert chosen() == "cudnn"
        assert "log-sum-exp" in reason("tokamax", return_lse=True)
        assert "after the bias" in reason("tokamax", bias=bias, logits_soft_cap=2.0)
    assert "promotion of dtypes" in reason("tokamax")


def test_unknown_platform() -> None:
    with pytest.raises(ValueError, match="platform must be among"):
        jaxmha.explain(HALF, HALF, HALF, platform="warp")


def test_a_host_without_cudnn_lowers_plain_xla() -> None:
    """JAX cannot trace cuDNN here, and says so; explain is not asked for a program."""
    with jaxmha.lowering_for("h200"):
        with pytest.raises(
            UnsupportedError, match="JAX reads the version of cuDNN on this machine"
        ):
            jax.eval_shape(
                lambda x: jaxmha.dot_product_attention(x, x, x, implementation="cudnn"), HALF
            )
        jax.eval_shape(lambda x: jaxmha.dot_product_attention(x, x, x), HALF)


# Trials on the machine that is there.


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A machine that takes itself for one with a GPU, whose cuDNN is its contract."""
    present = platforms.named("h200")._replace(present=True)
    monkeypatch.setattr(platforms, "_default", lambda: present)
    # Programs that run are lowered for the CPU at hand.
    monkeypatch.setattr(implementations, "KERNELS", dict.fromkeys(KERNELS, "cpu"))
    monkeypatch.setenv("JAXMHA_PROBE_SECONDS", "600")  # the machine may be busy
    calls = cudnn_contract.install(monkeypatch)
    jax.clear_caches()  # type: ignore[no-untyped-call]
    probe.forget()
    yield calls
    jax.clear_caches()  # type: ignore[no-untyped-call]
    probe.forget()


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run without a probe, which tests of other things need not wait for."""
    monkeypatch.setenv("JAXMHA_PROBE", "trust")


def small() -> Any:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((1, 6, 2, 8)), jnp.bfloat16)


def test_a_kernel_is_tried_once_and_used(gpu: list[Any]) -> None:
    x = small()
    run = jax.jit(lambda x: jaxmha.dot_product_attention(x, x, x))
    run(x)
    trials = [call["T"] for call in gpu][:-1]
    assert {16, 9, 10} == set(trials)  # 10: where a gradient is taken
    assert gpu[-1]["T"] == 6
    run(x[:, :4])
    assert [call["T"] for call in gpu] == [*trials, 6, 4]


@pytest.mark.everyday(defect=["raises", "wrong gradient"])
@pytest.mark.parametrize("defect", ["raises", "wrong", "wrong gradient", "NaN"])
def test_a_broken_kernel_means_the_next_and_one_warning(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    right = cudnn_contract.dot_product_attention

    right_gradient = cudnn_contract.backward

    def broken(*args: Any, **options: Any) -> Any:
        if defect == "raises":
            raise RuntimeError("no kernel image is available\nand more lines")
        out = right(*args, **options)
        spoil: dict[str, Any] = {"wrong": lambda x: 1.1 * x, "NaN": lambda x: x * jnp.nan}
        spoiled = jax.tree.map(lambda x: spoil[defect](x).astype(x.dtype), out)
        return spoiled

    def broken_gradient(*args: Any) -> Any:
        d_query, *others = right_gradient(*args)
        return (1.5 * d_query).astype(d_query.dtype), *others

    if defect == "wrong gradient":
        monkeypatch.setattr(private, "_dot_product_attention_bwd_rule", broken_gradient)
    else:
        monkeypatch.setattr(private, "dot_product_attention", broken)
    x = small()
    with pytest.warns(RuntimeWarning, match="cudnn does not work here in bfloat16") as caught:
        out = jaxmha.dot_product_attention(x, x, x)
    assert len(caught) == 1
    assert "and more lines" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxmha.dot_product_attention(x[:, :4], x, x)
    want = jaxmha.dot_product_attention(x, x, x, implementation="blocked")
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(want, np.float32))


def test_nothing_is_tried_for_another_platform(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("tried")

    monkeypatch.setattr(probe, "failure", never)
    with jaxmha.lowering_for("h200"):
        jax.jit(lambda x: jaxmha.dot_product_attention(x, x, x)).trace(small())
    assert jaxmha.explain(HALF, HALF, HALF, platform="a100").chosen == "cudnn"
    with pytest.raises(AssertionError, match="tried"):
        jaxmha.explain(HALF, HALF, HALF)


def tried(kind: Kind) -> probe.Finding:
    return probe._tried(cudnn.attend, cudnn.unsupported_reason, kind)


@pytest.mark.slow  # trials that pass are part of other tests
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "kind",
    [
        Kind("bfloat16"),
        Kind("bfloat16", queries=1),
        Kind("float16", queries=FEW),
        Kind("bfloat16", dense=True),
        Kind("bfloat16", packed=True),
        Kind("bfloat16", padded=True),
        Kind("bfloat16", heads=(192, 128)),
        Kind("bfloat16", heads=(256, 256)),
    ],
)
def test_the_trial_is_right_about_a_right_kernel(kind: Kind) -> None:
    assert tried(kind) == probe.Finding(None)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("leaks", [(), ("value",)])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("queries", [1, FEW])
def test_the_trial_of_a_cache(
    monkeypatch: pytest.MonkeyPatch, *, queries: int, paged: bool, leaks: tuple[str, ...]
) -> None:
    calls = cudnn_contract.install(monkeypatch, leaks=leaks)
    attend = partial(cudnn_cached.attend, paged=paged)
    kind = Kind("bfloat16", queries=queries)
    found = probe._tried(attend, cudnn_cached.unsupported_reason, kind)
    assert found == probe.Finding(None, Leaks(*2 * [len(leaks)]))
    assert calls


def test_one_query_is_probed_apart(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel skips dead keys, and that of its gradient does not: a step of decoding copies nothing."""
    calls = cudnn_contract.install(monkeypatch, leaks=cudnn_contract.ALL, clean=1)
    x = small().at[:, 4:].set(jnp.nan)

    def out(query: Any, key: Any, value: Any) -> Any:
        lengths = jnp.asarray([4])
        return jaxmha.dot_product_attention(query, key, value, key_value_seq_lengths=lengths)

    found, pull = jax.vjp(out, x[:, :1], x, x)
    for array in (found, *pull(found), out(x[:, :1], x, x)):
        assert np.isfinite(np.asarray(array, np.float32)).all()
    assert probe.leaks("cudnn", Kind("bfloat16", queries=1)) == Leaks(0, 2)
    assert {call["S"] for call in calls} == {384, 6}


@pytest.mark.parametrize("leaks", [("value",), cudnn_contract.ALL])
def test_a_kernel_that_leaks_gets_zeroed_arrays(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch, leaks: tuple[str, ...]
) -> None:
    """Found out with NaN beyond lengths, and then no NaN of the caller reaches the output."""
    cudnn_contract.install(monkeypatch, leaks=leaks)
    x = small()
    spoiled = x.at[:, 4:].set(jnp.nan)

    def out(key: Any) -> Any:
        lengths = jnp.asarray([4])
        return jaxmha.dot_product_attention(x, key, key, key_value_seq_lengths=lengths)

    found = jax.jit(out)(spoiled)
    assert probe.leaks("cudnn", Kind("bfloat16", queries=FEW)) == Leaks(1, min(len(leaks), 2))
    assert gpu[-1]["T"] == 6
    np.testing.assert_array_equal(
        np.asarray(found, np.float32), np.asarray(jax.jit(out)(x), np.float32)
    )


def by_steps(params: Any, cache: Any, sizes: Sequence[int], **options: Any) -> tuple[Any, Any]:
    """Outputs of tokens that steps of these sizes append, here and in plain XLA."""
    rng = np.random.default_rng(0)
    found, want = [], []
    for T in sizes:
        x = jnp.asarray(rng.standard_normal((2, T, 32)), jnp.bfloat16)
        counts = np.asarray([T, T - (T > 1)])
        with jaxmha.lowering_for("cpu"):
            want.append(jaxmha.extend(params, x, cache, q_lengths=counts, **options)[0])
        out, cache = jaxmha.extend(params, x, cache, q_lengths=counts, **options)
        found.append(out)
    one, other = (np.asarray(jnp.concatenate(x, 1), np.float32) for x in (found, want))
    return one, other


def cached_params() -> Any:
    return jaxmha.init_params(
        jax.random.key(0), num_heads=4, num_kv_heads=2, features=32, dtype=jnp.bfloat16
    )


ALONE = {"T": 1, "S": 12, "lse": False}
SINKS = {"sinks": jnp.asarray([0.5, -1, 2, 0], jnp.bfloat16)}
# Parameters of a layer, slots and window of its cache, sizes of steps, and the calls for the last step.
STEPS: dict[str, tuple[dict[str, Any], int, Any, tuple[int, ...], list[dict[str, Any]]]] = {
    "one": ({}, 12, None, (1, 1, 1), [ALONE]),
    "ring": ({}, 4, Mask.window(3, 0), (1,) * 9, [ALONE | {"S": 4}]),
    "window": ({}, 12, Mask.window(3, 0), (1,) * 6, [ALONE | {"S": 4}]),
    "window of a ring": ({}, 6, Mask.window(3, 0), (1,) * 9, [ALONE | {"S": 4}]),
    "several": (
        {}, 12, None, (3, 1, 5),
        [{"T": 10, "S": 12, "lse": True}, {"T": 5, "S": 5, "lse": True}],
    ),
    "sinks": (SINKS, 12, None, (2, 1), [{"T": 2, "S": 12, "lse": True}]),
}  # fmt: skip


@pytest.mark.everyday(name=["window of a ring", "several"])
@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("name", STEPS)
def test_a_step_reads_the_cache_as_it_lies(gpu: list[Any], name: str) -> None:
    """The same as in plain XLA, whatever the free slots hold; also in a ring as large as a window."""
    more, slots, mask, sizes, calls = STEPS[name]
    params = cached_params()._replace(**more)
    cache = jaxmha.KVCache.empty(params, 2, slots)
    cache = cache._replace(value=jnp.full_like(cache.value, jnp.nan))
    one, other = by_steps(params, cache, sizes, mask=mask)
    np.testing.assert_allclose(one, other, atol=0.03 * np.abs(other).max(), rtol=0)
    asked = [{key: call[key] for key in ("T", "S", "lse")} for call in gpu]
    assert all(call in asked for call in calls), asked


@pytest.mark.parametrize("leaks", [(), ("value",)])
def test_a_step_reads_pages_where_they_lie(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch, leaks: tuple[str, ...]
) -> None:
    """By cuDNN unless the probe finds that it reads dead slots; pages of any pool, after a fork."""
    cudnn_contract.install(monkeypatch, leaks=leaks)
    params = cached_params()
    cache = jaxmha.PagedKVCache.empty(params, 2, 12, pages=9, page_size=4)
    cache = cache._replace(value=jnp.full_like(cache.value, jnp.nan))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 4, 32)), jnp.bfloat16)
    with jaxmha.lowering_for("cpu"):
        _, cache = jaxmha.extend(params, x, cache, q_lengths=np.asarray([4, 1]))
    one, other = by_steps(params, cache.fork(0, 1), (1, 3, 1))
    np.testing.assert_allclose(one, other, atol=0.03 * np.abs(other).max(), rtol=0)
    asked = {call["T"] for call in gpu if call.get("pages") == 9}
    assert asked == (set() if leaks else {1, 6})
    found = probe.leaks(cudnn_cached.PAGED, Kind("bfloat16", queries=1))
    assert found == Leaks(*2 * [len(leaks)])


@pytest.mark.everyday(broken=[False])
@pytest.mark.parametrize("broken", [False, True])
def test_padded_keys_are_read_where_they_lie(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch, *, broken: bool
) -> None:
    """By a table, which no NaN of a padded key gets past; by copies where the probe finds it wrong."""
    if broken:

        def refuse(*_: Any, **__: Any) -> Any:
            raise ValueError("no pages of one position")

        monkeypatch.setattr(private, "_dot_product_attention_fwd_p", cudnn_contract.Bound(refuse))
    else:
        monkeypatch.setenv("JAXMHA_PROBE", "trust")
    x, valid = small(), np.asarray([[False, True, True, False, True, False]])
    spoiled = jnp.where(valid[..., None, None], x, jnp.nan)

    def out(key: Any, value: Any) -> Any:
        mask = Mask.padding(key_value=jnp.asarray(valid))
        return jaxmha.dot_product_attention(x, key, value, mask=mask)

    warns = pytest.warns(RuntimeWarning, match="keys in place does not work here in bfloat16")
    with warns if broken else contextlib.nullcontext():
        found = jax.jit(out)(spoiled, spoiled)
    assert gpu[-1].get("table", False) != broken
    with jaxmha.lowering_for("cpu"):
        want = jax.jit(out)(x, x)
    one, other = (np.asarray(y, np.float32) for y in (found, want))
    np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max(), rtol=0)
    jax.grad(lambda y: out(y, y).astype(np.float32).sum())(spoiled)
    assert "table" not in gpu[-1]


def test_a_busy_device_is_asked_again(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that lacks memory is not remembered."""
    right, failing = cudnn_contract.dot_product_attention, [2]

    def busy(*args: Any, **options: Any) -> Any:
        failing[0] -= 1
        if failing[0] >= 0:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
        return right(*args, **options)

    monkeypatch.setattr(private, "dot_product_attention", busy)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    x = small()
    with pytest.warns(RuntimeWarning, match="RESOURCE_EXHAUSTED"):
        jaxmha.dot_product_attention(x, x, x)
    assert gpu == []
    jaxmha.dot_product_attention(x[:, :4], x, x)
    assert gpu[-1]["T"] == 4


def test_a_kernel_that_hangs(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit, and the next implementation."""
    done = threading.Event()
    monkeypatch.setattr(private, "dot_product_attention", lambda *_, **__: done.wait())
    monkeypatch.setenv("JAXMHA_PROBE_SECONDS", "0.2")
    x = small()
    with pytest.warns(RuntimeWarning, match=r"did not finish within 0.2 s"):
        jaxmha.dot_product_attention(x, x, x)
    done.set()
    for thread in threading.enumerate():
        if thread.name == "jaxmha-probe":
            thread.join()


def test_the_environment_chooses_how_kernels_are_probed(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = small()
    monkeypatch.setenv("JAXMHA_PROBE", "0")
    reasons = dict(jaxmha.explain(x, x, x).reasons)
    assert reasons["cudnn"] == "JAXMHA_PROBE=0 uses no kernel"
    assert chosen(platform="a100") == chosen(platform="tpu") == "blocked"  # which are not here
    monkeypatch.setenv("JAXMHA_PROBE", "trust")
    assert jaxmha.explain(x, x, x).chosen == "cudnn"
    assert gpu == []

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(private, "dot_product_attention", broken)
    monkeypatch.setenv("JAXMHA_PROBE", "strict")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="JAXMHA_PROBE=strict: cudnn does not work here"):
            jaxmha.explain(x, x, x)
    monkeypatch.setenv("JAXMHA_PROBE", "maybe")
    with pytest.raises(ValueError, match="JAXMHA_PROBE must be among"):
        jaxmha.explain(x, x, x)


def test_the_trial_runs_on_the_device_of_the_caller() -> None:
    seen: list[Any] = []

    def attend(request: Any, *, leaks: Any) -> Any:
        seen.append(jax.config.jax_default_device)  # type: ignore[attr-defined]
        return reference.attend(request)

    device = jax.devices("cpu")[-1]
    with jax.default_device(device):
        found = probe.failure("stub", attend, reference.unsupported_reason, Kind("float32"))
    probe.forget()
    assert found is None
    assert set(seen) == {device}


@pytest.mark.slow
def test_processes_agree_on_a_kernel() -> None:
    """A kernel that fails in one process is used in none; a single process waits no longer than allowed."""
    first, second = workers.together(probed, 2)
    assert first["alone"] is first["not asked elsewhere"] is None
    assert first["together"].startswith("it fails in process 1: RuntimeError: no kernel image")
    assert "no kernel image" in second["together"]
    assert first["leaks"] == second["leaks"] == (None, (2, 2))
    assert first["busy"] == ["it fails in process 1: RuntimeError: RESOURCE_EXHAUSTED", None]
    assert second["busy"] == ["RuntimeError: RESOURCE_EXHAUSTED", None]
    assert 15 <= first["seconds"] < 60


def test_default_device_counts() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        assert platforms.current() == platforms.Platform("cpu", "cpu", present=True)


def test_the_private_call_is_as_it_was() -> None:
    """Parts of JAX that `cudnn` uses and that are not public."""
    import inspect

    found = list(inspect.signature(private.dot_product_attention).parameters)
    assert found[:7] == ["query", "key", "value", "bias", "mask", "q_seqlen", "kv_seqlen"]
    assert {"scale", "mask_type", "sliding_window_length", "return_residual"} <= set(found)
    kinds = {"NO_MASK", "PADDING", "CAUSAL", "PADDING_CAUSAL"}
    assert kinds <= {kind.name for kind in private.MaskType}
    assert cudnn.traceable() is None or "cuDNN" in (cudnn.traceable() or "")


@pytest.mark.slow
def test_nan_in_rows_without_keys_is_zeroed(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is right but for NaN beyond the lengths of queries is used, with zeros there."""
    right = cudnn_contract.dot_product_attention

    def spoiled(query: Any, key: Any, *args: Any, **options: Any) -> Any:
        out, lse = right(query, key, *args, **options | {"return_residual": True})
        q_seqlen = args[3] if len(args) > 3 else None
        if q_seqlen is not None:
            rows = jnp.arange(out.shape[1]).reshape(1, -1) < q_seqlen.reshape(-1, 1)
            out = jnp.where(rows[..., None, None], out, jnp.nan)
        return (out, lse) if options["return_residual"] else out

    monkeypatch.setattr(private, "dot_product_attention", spoiled)
    x = jnp.concatenate([small(), small()])

    def value(x: Any) -> Any:
        out = jaxmha.dot_product_attention(x, x, x, key_value_seq_lengths=jnp.asarray([4, 0]))
        return out.astype(np.float32).sum(), out

    (_, out), grads = jax.value_and_grad(value, has_aux=True)(x)
    assert probe.leaks("cudnn", Kind("bfloat16", queries=FEW)) == Leaks(2, 2)
    assert gpu[-1]["T"] == 6
    assert not np.asarray(out[1], np.float32).any()
    assert np.isfinite(np.asarray(grads, np.float32)).all()


@pytest.mark.usefixtures("trusted")
@pytest.mark.slow_variants("False")
@pytest.mark.parametrize("lse", [False, True])
def test_gradients_and_vmap_pass_the_choice(gpu: list[Any], lse: bool) -> None:
    """Nobody named the kernel, and every transformation meets it."""
    x = small()

    def value(q: Any) -> Any:
        found = jaxmha.dot_product_attention(q, x, x, is_causal=True, return_lse=lse)
        return sum(part.astype(jnp.float32).sum() for part in jax.tree.leaves(found))

    def plain(q: Any) -> Any:
        found = jaxmha.dot_product_attention(
            q, x, x, is_causal=True, return_lse=lse, implementation="blocked"
        )
        return sum(part.astype(jnp.float32).sum() for part in jax.tree.leaves(found))

    queries = jnp.stack([x, 2 * x])
    grads = jax.jit(jax.vmap(jax.grad(value)))(queries)
    assert gpu[-1]["T"] == 6
    want = jax.jit(jax.vmap(jax.grad(plain)))(queries)
    largest = float(jnp.abs(want.astype(jnp.float32)).max())
    error = jnp.abs(grads.astype(jnp.float32) - want.astype(jnp.float32)).max()
    assert float(error) <= 2**-7 * largest


@pytest.mark.usefixtures("trusted", "gpu")
@pytest.mark.parametrize("padded", [False, True])
def test_a_gradient_keeps_nothing_of_the_branch_for_other_platforms(*, padded: bool) -> None:
    """Between two programs it keeps what cuDNN reads: the operands, the output and the lse."""
    x = struct(2, 128, 4, 64)
    options: dict[str, Any] = {"key_value_seq_lengths": jnp.asarray([100, 3])} if padded else {}

    def pulled(*heads: Any) -> Any:
        return jax.vjp(lambda *x: jaxmha.dot_product_attention(*x, **options), *heads)

    kept = jax.tree.leaves(jax.eval_shape(pulled, x, x, x))
    assert [leaf.dtype for leaf in kept if leaf.ndim == 4] == [jnp.bfloat16] * 5
    assert sum(leaf.size for leaf in kept if leaf.ndim != 4) <= 2 * (2 * 4 * 128)


# The command line.


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["explain", *arguments])


def test_command() -> None:
    done = run("-T", "8192", "-N", "16", "-H", "128", "--causal", "--platform", "h200")
    assert done.exit_code == 0
    assert "cudnn" in done.stdout
    assert "chosen" in done.stdout


@pytest.mark.usefixtures("no_shape_hook")
def test_command_as_json() -> None:
    sizes = ("-B", "2", "-T", "5", "-S", "7", "-N", "4", "-K", "2", "-H", "8", "-h", "3")
    flags = ("--lengths", "--query-lengths", "--padding", "--segments", "--window", "2,0", "--lse")
    done = run(
        *sizes, *flags, "--mask", "2,1,5,7", "--bias", "4,1,1", "--platform", "gpu", "--json"
    )
    found = json.loads(done.stdout)
    assert found["chosen"] == "blocked"
    assert "offsets" in found["reasons"]["cudnn"]


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtype", "nope"), "--dtype must be a dtype"),
        (("--dtype", "int32"), "floating"),
        (("--platform", "warp"), "platform must be among"),
        (("--window", "a"), "--window must be integers"),
        (("--mask", "3,3"), "mask: expected axes"),
        (("--implementation", "flash"), "implementation must be among"),
        (("-K", "3"), "must be a multiple"),
    ],
)
def test_command_with_wrong_arguments(arguments: tuple[str, ...], message: str) -> None:
    done = run("-T", "5", "-N", "4", "-H", "8", *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert message in " ".join(done.stderr.split())


def test_command_says_by_its_code_that_none_can() -> None:
    done = run("-T", "5", "-N", "4", "-H", "8", "--weights", "--implementation", "cudnn")
    assert done.exit_code == 1


@pytest.mark.slow_variants("shape1*")
@pytest.mark.parametrize(
    ("shape", "field"),
    [((7,), "key_value_padding"), ((2, 1, 1, 7), "key_value_padding"),
     ((2, 1, 5, 1), "query_padding"), ((1, 1, 5, 7), "array")],
)  # fmt: skip
def test_dense_masks_of_keys_or_of_rows_alone_are_padding(
    shape: tuple[int, ...], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    run = implementations.attend

    def attend(request: Any, name: Any) -> Any:
        seen.append(request.mask)
        return run(request, name)

    monkeypatch.setattr(implementations, "attend", attend)
    query, key = (jnp.ones((2, size, 3, 4)) for size in (5, 7))
    with jax.disable_jit():
        jaxmha.dot_product_attention(query, key, key, mask=np.ones(shape, bool))
    (mask,) = seen
    arrays = ("array", "query_padding", "key_value_padding")
    assert [name for name in arrays if getattr(mask, name) is not None] == [field]


@pytest.mark.parametrize("implementation", ["reference", "blocked", None])
@pytest.mark.parametrize("gradient", [False, True])
def test_no_query_heads(implementation: str | None, gradient: bool) -> None:
    q, k, v = (np.ones((2, n, heads, 3), np.float32) for n, heads in ((1, 0), (71, 5), (71, 5)))

    def of(q: Any, k: Any, v: Any) -> Any:
        out, lse = jaxmha.dot_product_attention(
            q, k, v, is_causal=True, return_lse=True, implementation=implementation
        )
        assert out.shape == (2, 1, 0, 3)
        assert lse.shape == (2, 0, 1)
        return out.sum() + lse.sum()

    if gradient:
        assert not any(np.asarray(x).any() for x in jax.grad(of, (0, 1, 2))(q, k, v))
    else:
        assert of(q, k, v) == 0
