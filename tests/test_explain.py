"""`explain` names the implementation that a device runs by default, and why it runs no other."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, implementations
from jaxmha.bench import choice
from jaxmha.bench.case import Case
from jaxmha.implementations import SupportQuery, UnsupportedError, platforms
from tests import conformance
from tests.cases import shaped

PADDED = Mask.padding(key_value=np.ones((2, 1024), bool))


WINDOW = Mask.window(3, None)


HALF = shaped(2, 1024, 8, 128)


def chosen(*, platform: str = "h200", like: Any = HALF, **options: Any) -> str | None:
    return jaxmha.explain(like, like, like, platform=platform, **options).chosen


def reason(name: str, *, platform: str = "h200", like: Any = HALF, **options: Any) -> str:
    found = jaxmha.explain(like, like, like, platform=platform, implementation=name, **options)
    assert found.chosen is None
    return found.reasons[0][1] or ""


@pytest.mark.parametrize("device", ["h200", "H100", "gpu", "cuda", "a100", "b200"])
def test_gpus_run_cudnn_in_half_precision(device: str) -> None:
    assert chosen(platform=device) == "cudnn"
    assert chosen(platform=device, like=shaped(2, 1024, 8, 128, dtype=jnp.float32)) == "blocked"


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
        {"key_value_seq_lengths": shaped(2, dtype=jnp.int32)},
        {"mask": PADDED},
        {"mask": PADDED, "is_causal": True},
        {"mask": PADDED, "is_causal": True, "scale": 1e-9},
        {"mask": PADDED, "is_causal": True, "like": shaped(2, 1024, 8, 256)},
        {"mask": shaped(2, 1, 1, 1024, dtype=jnp.bool_)},
        {"mask": Mask.causal(7)},
        {"local_window_size": (128, 0)},
        {"bias": shaped(1, 8, 1024, 1024)},
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
        ({"like": shaped(2, 64, 8, 128, dtype=jnp.float32)}, "got float32"),
        ({"like": shaped(2, 64, 8, 264)}, "at most 256"),
        ({"like": shaped(2, 64, 8, 136), "platform": "a100"}, "at most 128"),
        ({"like": shaped(2, 64, 8, 264), "platform": "b200"}, "at most 256"),
        ({"platform": "t4"}, "capability 8.0 or higher, got t4"),
        ({"platform": "tpu"}, "got tpu"),
        ({"logits_soft_cap": 3.0}, "soft cap"),
        ({"return_weights": True}, "never materialised"),
        ({"dropout_rate": 0.1, "dropout_key": shaped(2, dtype=jnp.uint32)}, "dropout"),
        ({"segment_ids": shaped(2, 1024, dtype=jnp.int32)}, "offsets"),
        ({"mask": Mask.causal(np.asarray([1, 2]))}, "Python integer"),
        ({"mask": WINDOW}, "right side"),
        ({"bias": shaped(1, 8, 1024, 1024), "return_lse": True}, "to a bias"),
        (
            {"like": shaped(2, 64, 8, 64, dtype=jnp.float16), "bias": shaped(1, 8, 64, 64)},
            "far below",
        ),
        (
            {
                "like": shaped(2, 1024, 8, 64, dtype=jnp.float16),
                "mask": PADDED,
                "is_causal": True,
                "scale": 1e-9,
            },
            "far below",
        ),
        (
            {
                "like": shaped(2, 1024, 8, 256, dtype=jnp.float16),  # no feature is left
                "mask": PADDED,
                "is_causal": True,
            },
            "far below",
        ),
        ({"softmax_dtype": jnp.bfloat16}, "softmax_dtype"),
        ({"like": shaped(2, 0, 8, 64)}, "at least 1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_cudnn_says_why_not(options: dict[str, Any], why: str) -> None:
    assert why in reason("cudnn", **options)


def test_cudnn_counts_the_features_of_values() -> None:
    query, value = shaped(2, 64, 8, 128), shaped(2, 64, 8, 264)
    found = jaxmha.explain(query, query, value, platform="h200", implementation="cudnn")
    assert "at most 256 features on h200, got 128, 264" in str(found.reasons[0][1])


def test_named_implementations_raise_the_reason() -> None:
    x = jnp.ones((1, 8, 2, 8))
    with pytest.raises(UnsupportedError, match="cuDNN takes bfloat16 and float16, got float32"):
        jaxmha.dot_product_attention(x, x, x, implementation="cudnn")
    half = x.astype(jnp.bfloat16)
    with pytest.raises(UnsupportedError, match="runs on TPU, not on cpu"):
        jaxmha.dot_product_attention(half, half, half, implementation=["splash"])


def test_tpus_run_splash_from_its_tile_on() -> None:
    few = shaped(2, 511, 8, 128, dtype=jnp.bfloat16)
    assert chosen(platform="tpu") == "splash"
    assert chosen(platform="tpu", like=few) == "blocked"
    assert chosen(platform="tpu", like=few, implementation=["splash", "blocked"]) == "splash"
    assert chosen(platform="tpu", like=shaped(2, 1024, 8, 128, dtype=jnp.float32)) == "blocked"


def test_packed_sequences_run_on_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = shaped(2, 1024, dtype=jnp.int32)
    packed = Mask.packed(np.array([[5, 700]], np.int32), size=1024)
    assert chosen(mask=packed, is_causal=True) == "cudnn"
    assert chosen(mask=packed, platform="b200") == "cudnn"
    assert chosen(mask=packed, platform="a100") == "blocked"
    assert chosen(segment_ids=ids) == "blocked"
    monkeypatch.setattr(implementations.tokamax, "find_spec", lambda name: object())
    with jax.numpy_dtype_promotion("standard"):
        assert chosen(segment_ids=ids) == "tokamax"
        assert "1073741824 pairs" in reason(
            "tokamax", like=shaped(1, 2**16, 8, 128, dtype=jnp.bfloat16),
            segment_ids=shaped(1, 2**16, dtype=jnp.int32),
        )  # fmt: skip


def test_biases_go_to_tokamax_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations.tokamax, "find_spec", lambda name: object())
    bias = shaped(1, 8, 1024, 1024)
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


def test_default_device_counts() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        assert platforms.current() == platforms.Platform("cpu", "cpu", present=True)


def test_a_float64_array_is_refused_as_in_the_call() -> None:
    wide = np.ones((1, 5, 2, 3))
    with jax.enable_x64(False), pytest.raises(TypeError, match="query is float64, which JAX would"):
        jaxmha.explain(wide, wide, wide)


@pytest.mark.parametrize("name", ["JAXMHA_PROBE", "JAXMHA_PROBE_SECONDS", "JAXMHA_NATIVE"])
def test_a_wrong_environment_variable_is_named_on_every_platform(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has no effect: the program may move to a machine where it has one."""
    monkeypatch.setenv(name, "nonsense")
    for platform in ("cpu", "h200", "tpu"):
        with pytest.raises(ValueError, match=f"{name} must be .*'nonsense'"):
            chosen(platform=platform)
        with pytest.raises(ValueError, match=f"{name} must be .*'nonsense'"):
            chosen(platform=platform, implementation="reference")


@pytest.mark.parametrize("name", ["blocked", "cudnn"])
def test_the_dtype_of_softmax_that_a_reason_names_is_taken(name: str) -> None:
    why = reason(name, softmax_dtype="bfloat16")
    assert why == "softmax is in float32: softmax_dtype must be None or float32"
    assert chosen(softmax_dtype="float32", implementation=name) == name


WRONG: dict[str, Any] = {
    "query": "a", "key": [[1.0]], "bias": 1.0, "mask": "causal", "segment_ids": [[0, 1]],
    "sinks": [1.0, 2.0], "implementation": 3,
}  # fmt: skip


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("name", [*WRONG, "implementation-empty"])
def test_explain_refuses_what_the_call_refuses(name: str) -> None:
    """With the same message: `explain` traces arrays alone, and JAX's message names no argument."""
    x = np.ones((1, 5, 2, 3), np.float32)
    argument = name.partition("-")[0]
    given: Any = {"query": x, "key": x, "value": x} | {argument: WRONG.get(name, "")}
    with pytest.raises((TypeError, ValueError), match=argument) as called:
        jaxmha.dot_product_attention(**given)
    with pytest.raises(type(called.value)) as explained:
        jaxmha.explain(**given)
    assert str(explained.value).splitlines()[0] == str(called.value).splitlines()[0]
    several: Any = {"blocked"}  # any iterable of names
    assert jaxmha.explain(x, x, x, implementation=several).chosen == "blocked"


SMALL: Any = shaped(1, 5, 2, 3, dtype=jnp.float32)
PROJECTION: Any = jaxmha.Projection(shaped(6, 2, 3, dtype=jnp.float32))
LAYER = jaxmha.MHAParams(PROJECTION, PROJECTION, PROJECTION)
EXPLAINED: list[Any] = [
    lambda: jaxmha.explain(SMALL, SMALL, SMALL, implementation="blocked"),
    lambda: jaxmha.explain_layer(LAYER, shaped(1, 5, 6, dtype=jnp.float32)),
    lambda: choice.explain(Case("core", "forward", "plain", 1, 5, 5, 2, 2, 3)),
]


def queries() -> int:
    gc.collect()
    return sum(type(x) is SupportQuery for x in gc.get_objects())


def test_explanations_leave_no_trace_of_the_call() -> None:
    """JAX would keep it as long as the process lives, and every call would be slower than the last."""
    before = queries()
    for explained in EXPLAINED:
        assert explained() == explained()
    assert queries() == before
    with pytest.raises(TypeError, match="unhashable"):
        hash(SupportQuery())
