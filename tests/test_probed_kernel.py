"""A kernel is tried before it is used: what the probe finds wrong, and what runs then."""

import threading
import time
import warnings
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private

import jaxmha
from jaxmha.implementations import probe, probe_cases
from jaxmha.implementations.base import Leaks
from jaxmha.implementations.fused import cudnn, cudnn_cached
from jaxmha.implementations.probe_cases import FEW, Kind
from tests import cudnn_contract
from tests.simulated_gpu import small
from tests.test_explain import chosen


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
    x = small()
    with jaxmha.lowering_for("h200"):
        jax.jit(lambda x: jaxmha.dot_product_attention(x, x, x)).trace(x)
    assert jaxmha.explain(x, x, x, platform="a100").chosen == "cudnn"
    with pytest.raises(AssertionError, match="tried"):
        jaxmha.explain(x, x, x)


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


@pytest.mark.slow
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


@pytest.mark.slow_variants("leaks1")
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
    # The probe tried every case; T counts both heads of a group where they are rows of one call.
    assert {call["T"] for call in gpu[:-1]} == {16, 32, 18}
    assert probe.leaks("cudnn", Kind("bfloat16", queries=FEW)) == Leaks(1, min(len(leaks), 2))
    assert gpu[-1]["T"] == 6
    np.testing.assert_array_equal(
        np.asarray(found, np.float32), np.asarray(jax.jit(out)(x), np.float32)
    )


def test_a_busy_device_is_asked_again_and_a_kernel_tried_once(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that lacks memory is not remembered; one that passes is, and the kernel is used."""
    right, failing = cudnn_contract.dot_product_attention, [2]
    every = probe_cases.cases
    monkeypatch.setattr(probe_cases, "cases", lambda kind: islice(every(kind), 1))

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
    run = jax.jit(lambda x: jaxmha.dot_product_attention(x, x, x))
    run(x[:, :4])
    trials = [call["T"] for call in gpu][:-1]
    assert set(trials) == {32}
    assert gpu[-1]["T"] == 4
    run(x[:, :5])
    assert [call["T"] for call in gpu] == [*trials, 4, 5]


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
