"""Keras' own layers under `jaxmha.keras.use()`, against themselves without it."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from keras.src.backend.jax import nn

import jaxmha
import jaxmha.keras
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from tests.masks.draws import B, N, S, T, numbers
from tests.tolerance import LAYER, assert_close, assert_same

keras = pytest.importorskip("keras")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*was passed an input with a mask:UserWarning"),
    # Keras promotes as users have it.
    pytest.mark.usefixtures("implicit_promotion"),
]
D, H = 11, 13
LAYERS = ("mha", "gqa")
OWN_TESTS = ("multi_head_attention_test", "grouped_query_attention_test")


class Case(NamedTuple):
    """Settings of a layer, arguments of its call, and whether jaxmha computes it."""

    name: str
    settings: Mapping[str, Any] = MappingProxyType({})
    arguments: Mapping[str, Any] = MappingProxyType({})
    ours: bool = True
    dtype: str = "float32"
    shape: tuple[int, ...] = (T,)


def mask_of(*shape: int) -> NDArray:
    return np.random.default_rng(len(shape)).random(shape) < 0.6


MASK = mask_of(B, T, S)
MASK[1, 2] = False
SCORES = {"return_attention_scores": True}
CASES = (
    Case("plain"),
    Case("causal", arguments={"use_causal_mask": True}),
    Case("mask", arguments={"attention_mask": MASK}),
    Case("integer mask", arguments={"attention_mask": MASK.astype(np.int32)}),
    Case("mask of T and S", arguments={"attention_mask": MASK[1]}),
    Case("both masks", arguments={"attention_mask": MASK, "use_causal_mask": True}),
    Case("value mask", arguments={"value_mask": MASK[:, 0]}),
    Case("window", {"sliding_window": 2}),
    Case("gate", {"use_gate": True}),
    Case("scores", arguments=SCORES),
    Case("scores, causal", arguments={"use_causal_mask": True, **SCORES}),
    Case("scores, mask", arguments={"attention_mask": MASK, **SCORES}),
    Case("scores, mask of T and S", arguments={"attention_mask": MASK[1], **SCORES}),
    Case("no dropout at inference", {"dropout": 0.5}, {"attention_mask": MASK}),
    Case("dropout", {"dropout": 0.5, "seed": 3}, {"training": True}, ours=False),
    Case("bfloat16", arguments={"attention_mask": MASK}, dtype="bfloat16"),
    Case("float16 scores", arguments={"attention_mask": MASK, **SCORES}, dtype="float16"),
    Case("mixed", arguments={"attention_mask": MASK}, dtype="mixed_bfloat16"),
)
OF_MHA = (
    Case("mask per head", arguments={"attention_mask": mask_of(B, N, T, S)}),
    Case("value width", {"value_dim": 5}, SCORES),
    Case("two axes", {"attention_axes": (1, 2)}, shape=(2, 3), ours=False),
    Case("one of two axes", {"attention_axes": 1}, shape=(2, 3), ours=False),
)
# A layer of the other class makes its masks Boolean, and this one compares them with 0.5.
OF_GQA = (
    Case("scores, 0.4 in the mask", arguments={"attention_mask": MASK * 0.4, **SCORES}, ours=False),
)
PAIRS = [
    *((kind, case) for kind in LAYERS for case in CASES),
    *(("mha", case) for case in OF_MHA),
    *(("gqa", case) for case in OF_GQA),
]


def made(kind: str, case: Case) -> Any:
    options = {"dtype": case.dtype, **case.settings}
    layer = (
        keras.layers.GroupQueryAttention(H, 2 * N, N, **options)
        if kind == "gqa"
        else keras.layers.MultiHeadAttention(N, H, **options)
    )
    query, value = inputs(case)
    layer.build(query.shape, value.shape)
    layer.set_weights([0.3 * numbers(*w.shape, seed=i) for i, w in enumerate(layer.weights)])
    return layer


def inputs(case: Case) -> tuple[NDArray, NDArray]:
    rest = case.shape[1:]
    query, value = numbers(B, T, *rest, D), numbers(B, S, *rest, D, seed=1)
    return query.astype(np.float32), value.astype(np.float32)


def called(kind: str, case: Case) -> tuple[Any, int]:
    """The results of a fresh layer, and how many calls jaxmha computed."""
    layer = made(kind, case)
    own = jaxmha.dot_product_attention
    with mock.patch.object(jaxmha, "dot_product_attention", wraps=own) as counted:
        found = layer(*inputs(case), **case.arguments)
    return [to_numpy(x) for x in (found if isinstance(found, tuple) else (found,))], int(
        counted.call_count
    )


@pytest.mark.everyday(case=["both masks", "scores, mask", "dropout", "mask per head"])
@pytest.mark.slow_variants("gqa-scores, mask", "gqa-dropout")
@pytest.mark.parametrize(("kind", "case"), PAIRS)
def test_the_same_as_keras(kind: str, case: Case) -> None:
    own, none = called(kind, case)
    with jaxmha.keras.use():
        found, calls = called(kind, case)
    assert (none, calls) == (0, int(case.ours))
    for actual, expected in zip(found, own, strict=True):
        if case.ours:
            assert actual.dtype == expected.dtype
            assert_close(actual, expected, factor=LAYER if case.dtype != "float32" else 1.0)
        else:
            assert_same(actual, expected)


def test_gradients_and_compiled_models() -> None:
    import jax
    import jax.numpy as jnp

    layer, (query, value) = made("mha", CASES[0]), inputs(CASES[0])
    weights = [w.value for w in layer.trainable_variables]
    rest = [w.value for w in layer.non_trainable_variables]

    def loss(arrays: Any) -> Any:
        out, _ = layer.stateless_call(arrays, rest, query, value, use_causal_mask=True)
        return jnp.sum(out * query)

    own = jax.jit(jax.grad(loss))(weights)
    with jaxmha.keras.use():
        found = jax.jit(jax.grad(loss))(weights)
    flat, expected = (np.concatenate([np.ravel(x) for x in xs]) for xs in (found, own))
    assert_close(flat, expected)


def seams() -> list[Any]:
    places = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
    return [nn.dot_product_attention, *(place._compute_attention for place in places)]


def is_on() -> list[bool]:
    return [hasattr(seam, "__wrapped__") for seam in seams()]


def test_blocks_nest_and_end_by_exceptions() -> None:
    own = seams()
    with jaxmha.keras.use():
        with pytest.raises(ZeroDivisionError), jaxmha.keras.use():
            1 / 0  # noqa: B018
        assert all(is_on())
    assert seams() == own


def test_a_switch() -> None:
    own = seams()
    first, second = jaxmha.keras.use(), jaxmha.keras.use()
    first.on()
    first.off()
    first.off()
    assert all(is_on())
    second.off()
    assert seams() == own
    with second:
        assert all(is_on())
    assert seams() == own


def test_a_patch_on_top_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone else replaces the function in a block, and calls ours: it is inert after the block."""

    def on_top(*arguments: Any, **keywords: Any) -> Any:
        return below(*arguments, **keywords)

    switch = jaxmha.keras.use()
    below = nn.dot_product_attention
    with monkeypatch.context() as patch:
        patch.setattr(nn, "dot_product_attention", on_top)
        switch.off()
        assert nn.dot_product_attention is on_top
        assert called("mha", CASES[0])[1] == 0
    nn.dot_product_attention = below.__wrapped__


def test_other_threads_see_it() -> None:
    seen: list[int] = []
    with jaxmha.keras.use():
        thread = threading.Thread(target=lambda: seen.append(sum(is_on())))
        thread.start()
        thread.join()
    assert seen == [3]


def test_derived_classes_keep_their_own_attention() -> None:
    class Doubled(keras.layers.MultiHeadAttention):  # type: ignore[misc,name-defined]
        def _masked_softmax(self, scores: Any, mask: Any = None) -> Any:
            return 2 * super()._masked_softmax(scores, mask)

    query, value = inputs(CASES[0])
    layer = Doubled(N, H)
    own, _ = layer(query, value, return_attention_scores=True)
    with jaxmha.keras.use():
        found, _ = layer(query, value, return_attention_scores=True)
    assert_same(to_numpy(found), to_numpy(own))


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        (keras, "__version__", "3.99.0", "knows Keras 3.15.0, 3.15.1, and this is Keras 3.99.0"),
        (keras.backend, "backend", lambda: "torch", "needs Keras on JAX, .* is torch: set KERAS_B"),
    ],
    ids=["version", "backend"],
)
def test_refused(
    place: Any,
    name: str,
    value: str | Callable[[], str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = seams()
    monkeypatch.setattr(place, name, value)
    with pytest.raises(RuntimeError, match=message):
        jaxmha.keras.use()
    assert seams() == own


PLUGIN = """
import jaxmha, jaxmha.keras
calls, own = 0, jaxmha.dot_product_attention

def counted(*arguments, **keywords):
    global calls
    calls += 1
    return own(*arguments, **keywords)

def pytest_configure(config):
    jaxmha.dot_product_attention = counted
    jaxmha.keras.use()

def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"jaxmha computed {calls} calls")
"""


@pytest.mark.slow
def test_the_tests_of_keras(tmp_path: Any) -> None:
    """Tests in the installed package, of both layers: 80, as without jaxmha."""
    (tmp_path / "with_jaxmha.py").write_text(PLUGIN)
    names = [f"keras.src.layers.attention.{name}" for name in OWN_TESTS]
    root = os.path.dirname(os.path.dirname(__file__))
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "with_jaxmha"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--pyargs", *names],
        env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}", "KERAS_BACKEND": "jax"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    counts = re.search(r"jaxmha computed (\d+) calls\n.*?(\d+) passed", done.stdout, re.DOTALL)
    assert counts is not None, done.stdout
    assert int(counts[1]) > 100, counts
    assert counts[2] == "80"
