"""Wrong arguments are refused while tracing, by name, with axes expected and shape received.

The shape hook of the test suite would refuse wrong shapes first; users run without it.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, Semantics
from jaxmha.implementations import IMPLEMENTATIONS
from tests import cases
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("no_shape_hook")

# B=2 T=5 S=7 K=3 N=6 H=11 h=13
ARRAYS = cases.arrays(Case("errors"))


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


def refused(
    call: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], texts: list[str]
) -> None:
    """The call raises while tracing, with every word in the message."""
    # Tracing float64 from outside rounds it before the call sees it: that stays outside.
    traced = {
        name: x
        for name, x in arguments.items()
        if isinstance(x, np.ndarray) and x.dtype != np.float64
    }
    static = {name: x for name, x in arguments.items() if name not in traced}

    def eager() -> Any:
        return call(**arguments)

    def tracing() -> Any:
        return jax.eval_shape(lambda traced: call(**traced, **static), traced)

    for run in (eager, tracing):
        with pytest.raises(error) as caught:
            run()
        assert type(caught.value) is error, "not a subclass: it is raised on purpose"
        missing = [word for word in texts if word not in str(caught.value)]
        assert not missing, f"{missing} not in: {caught.value}"


ATTENTION: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "query without heads": ({"query": zeros(2, 11)}, ValueError, ["query", "T, N, H", "(2, 11)"]),
    "query of five axes": ({"query": zeros(1, 2, 5, 6, 11)}, ValueError,
        ["query", "B, T, N, H", "(1, 2, 5, 6, 11)"]),
    "key of another head dim": ({"key": zeros(2, 7, 3, 5)}, ValueError,
        ["key", "B, S, K, H", "H=11", "(2, 7, 3, 5)"]),
    "key of another batch": ({"key": zeros(3, 7, 3, 11)}, ValueError,
        ["key", "B, S, K, H", "B=2", "(3, 7, 3, 11)"]),
    "key without batch": ({"key": zeros(7, 3, 11)}, ValueError,
        ["key", "B, S, K, H", "(7, 3, 11)"]),
    "value of another length": ({"value": zeros(2, 5, 3, 13)}, ValueError,
        ["value", "B, S, K, h", "S=7", "(2, 5, 3, 13)"]),
    "value of other heads": ({"value": zeros(2, 7, 6, 13)}, ValueError,
        ["value", "B, S, K, h", "K=3", "(2, 7, 6, 13)"]),
    "heads that do not divide": ({"key": zeros(2, 7, 4, 11), "value": zeros(2, 7, 4, 13)},
        ValueError, ["N=6", "K=4", "multiple", "(2, 5, 6, 11)", "(2, 7, 4, 11)"]),
    "no heads": ({"key": zeros(2, 7, 0, 11), "value": zeros(2, 7, 0, 13)}, ValueError,
        ["K=0", "multiple"]),
    "integer query": ({"query": zeros(2, 5, 6, 11, dtype=np.int32)}, TypeError, ["query", "int32"]),
    "Boolean value": ({"value": zeros(2, 7, 3, 13, dtype=bool)}, TypeError, ["value", "bool"]),
    "complex key": ({"key": zeros(2, 7, 3, 11, dtype=np.complex64)}, TypeError,
        ["key", "complex64"]),
    "float64 without x64": ({"value": zeros(2, 7, 3, 13, dtype=np.float64)}, TypeError,
        ["value", "float64"]),
    "float64 bias without x64": ({"bias": zeros(5, 7, dtype=np.float64)}, TypeError,
        ["bias", "float64"]),
    "float mask": ({"mask": zeros(5, 7)}, TypeError, ["mask", "Boolean", "float32", "bias="]),
    "integer mask": ({"mask": zeros(5, 7, dtype=np.int32)}, TypeError, ["mask", "int32", "!= 0"]),
    "transposed mask": ({"mask": zeros(7, 5, dtype=bool)}, ValueError,
        ["mask", "T", "S", "T=5", "S=7", "(7, 5)"]),
    "mask of batch and length": ({"mask": zeros(2, 7, dtype=bool)}, ValueError,
        ["mask", "T=5", "S=7", "(2, 7)", "mask); True = attend"]),
    "mask of batch, 1 and length": ({"mask": zeros(2, 1, 7, dtype=bool)}, ValueError,
        ["mask", "(2, 1, 7)", "(*B, 1, S) make (*B, 1, 1, S)", "mask[..., None, :, :]"]),
    "name of a mask": ({"mask": "causal"}, TypeError, ["str 'causal': ", "Mask.causal()",
        "is_causal=True"]),
    "bool as a mask": ({"mask": True}, TypeError, ["bool True: ", "is_causal=True"]),
    "padding as lengths": ({"key_value_seq_lengths": zeros(2, 7, dtype=bool)}, TypeError,
        ["key_value_seq_lengths", "Mask.padding(key_value=...)"]),
    "mask of five axes": ({"mask": zeros(3, 2, 6, 5, 7, dtype=bool)}, ValueError,
        ["mask", "(3, 2, 6, 5, 7)"]),
    "mask of kv heads": ({"mask": zeros(2, 3, 5, 7, dtype=bool)}, ValueError,
        ["mask", "N=6", "(2, 3, 5, 7)"]),
    "bias of another length": ({"bias": zeros(2, 6, 5, 5)}, ValueError,
        ["bias", "S=7", "(2, 6, 5, 5)"]),
    "Boolean bias": ({"bias": zeros(5, 7, dtype=bool)}, TypeError, ["bias", "bool"]),
    "integer bias": ({"bias": zeros(5, 7, dtype=np.int32)}, TypeError, ["bias", "int32"]),
    "query lengths of another batch": ({"query_seq_lengths": zeros(3, dtype=np.int32)}, ValueError,
        ["query_seq_lengths", "B", "(3,)"]),
    "key lengths per pair": ({"key_value_seq_lengths": zeros(2, 5, dtype=np.int32)}, ValueError,
        ["key_value_seq_lengths", "B", "(2, 5)"]),
    "float lengths": ({"key_value_seq_lengths": zeros(2)}, TypeError,
        ["key_value_seq_lengths", "integer", "float32"]),
    "Boolean lengths": ({"query_seq_lengths": zeros(2, dtype=bool)}, TypeError,
        ["query_seq_lengths", "integer", "bool"]),
    "one array of segments for two lengths": ({"segment_ids": zeros(2, 5, dtype=np.int32)},
        ValueError, ["segment_ids", "S=7", "(2, 5)"]),
    "segments of another batch": ({"segment_ids": (zeros(3, 5, dtype=np.int32),
        zeros(3, 7, dtype=np.int32))}, ValueError, ["segment_ids", "T=5", "(3, 5)"]),
    "float segments": ({"segment_ids": (zeros(2, 5), zeros(2, 7))}, TypeError,
        ["segment_ids", "integer", "float32"]),
    "padding of another length": ({"mask": Mask.padding(key_value=zeros(2, 5, dtype=bool))},
        ValueError, ["key_value_padding", "S=7", "(2, 5)"]),
    "offsets of another batch": ({"mask": Mask.causal(zeros(3, dtype=np.int32))}, ValueError,
        ["causal_offset", "B", "(3,)"]),
    "window of a bool": ({"local_window_size": True}, TypeError, ["window", "integers", "True"]),
    "a window of a float array": ({"local_window_size": np.array(1.0)}, TypeError,
        ["window", "integers", "1.0"]),
    "a window of a bool of JAX": ({"local_window_size": jnp.array(True)}, TypeError,
        ["window", "integers", "True"]),
    "a window of three of JAX": ({"local_window_size": jnp.ones(3, int)}, ValueError,
        ["local_window_size", "left, right"]),
    "a window of columns": ({"local_window_size": np.ones((2, 1), int)}, ValueError,
        ["local_window_size"]),
    "half a window": ({"local_window_size": (1.5, 2)}, TypeError, ["window", "integers", "1.5"]),
    "no head size": ({"query": zeros(2, 5, 6, 0), "key": zeros(2, 7, 3, 0)}, ValueError,
        ["H", "at least 1", "(2, 5, 6, 0)"]),
    "bias as a number": ({"bias": 1.0}, TypeError, ["bias", "array", "float"]),
    "mask as a list": ({"mask": [[True] * 7] * 5}, TypeError, ["mask", "array", "list"]),
    "scale as text": ({"scale": "1"}, TypeError, ["scale", "number", "str"]),
    "scale of several numbers": ({"scale": jnp.ones(2)}, ValueError, ["scale", "one", "(2,)"]),
    "scale per head": ({"scale": zeros(6, 1)}, ValueError, ["scale", "one number", "(6, 1)"]),
    "complex scale": ({"scale": jnp.ones((), "complex64")}, TypeError, ["scale", "complex64"]),
    "Boolean scale": ({"scale": zeros(dtype=bool)}, TypeError, ["scale", "real", "bool"]),
    "scale that is not a number": ({"scale": float("nan")}, ValueError, ["scale", "finite", "nan"]),
    "infinite soft cap": ({"logits_soft_cap": float("inf")}, ValueError,
        ["logits_soft_cap", "finite", "inf"]),
    "dropout as text": ({"dropout_rate": "0.1"}, TypeError, ["dropout_rate", "number", "str"]),
    "no dropout rate": ({"dropout_rate": None}, TypeError, ["dropout_rate", "number", "None"]),
    "negative window": ({"local_window_size": (-1, 2)}, ValueError, ["window", "-1"]),
    "dropout of everything": ({"dropout_rate": 1.0}, ValueError, ["dropout_rate", "1.0"]),
    "negative dropout": ({"dropout_rate": -0.1}, ValueError, ["dropout_rate", "-0.1"]),
    "NaN dropout": ({"dropout_rate": float("nan")}, ValueError, ["dropout_rate", "nan"]),
    "soft cap of zero": ({"logits_soft_cap": 0.0}, ValueError, ["logits_soft_cap", "0.0"]),
    "integer softmax": ({"softmax_dtype": np.int32}, ValueError, ["softmax_dtype", "int32"]),
    "softmax without -inf": ({"softmax_dtype": jnp.float8_e4m3fn}, ValueError, ["softmax_dtype", "-inf", "e4m3fn"]),
    "array as soft cap": ({"logits_soft_cap": jnp.float32(2)}, TypeError, ["logits_soft_cap", "a JAX array"]),
    "array as a flag": ({"is_causal": jnp.array(True)}, TypeError, ["is_causal", "a JAX array"]),
}  # fmt: skip


@pytest.mark.parametrize("what", ATTENTION)
def test_attention(what: str) -> None:
    change, error, texts = ATTENTION[what]
    refused(jaxmha.dot_product_attention, ARRAYS | change, error, texts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fully_masked", "uniform"),
        ("qk_norm", "batch"),
        ("dropout_rate", 1.0),
        ("dropout_broadcast", ("Q",)),
        ("logits_soft_cap", -1.0),
        ("qk_norm_epsilon", -1e-6),
        ("scale", float("inf")),
        ("softmax_dtype", np.int32),
        ("softmax_dtype", jnp.float8_e4m3fnuz),
        ("softmax_dtype", jnp.float8_e8m0fnu),
        ("softmax_dtype", jnp.float4_e2m1fn),
        ("precision", "highst"),
    ],
)
def test_semantics(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        Semantics(**{field: value})


@pytest.mark.parametrize(
    "value", ["frob", 3, ["frob"], ("reference", "frob"), np.array([1, 2])], ids=repr
)
@pytest.mark.usefixtures("no_shape_hook")
def test_wrong_options_list_the_choices(value: Any) -> None:
    """For every kind of argument."""
    x = np.ones((1, 2, 1, 3), np.float32)
    params = jaxmha.init_params(jax.random.key(0), num_heads=1, features=3)
    choices = {
        "fully_masked": r"\('zero', 'nan', 'mean'\)",
        "implementation": re.escape(str(list(IMPLEMENTATIONS))),
        "return_weights": "(a bool|False, True, 'before_dropout', 'after_dropout')",
        "dropout_broadcast": "B, N, T, S",
        "precision": "'default', 'high', 'highest'",
    }
    for name, listed in choices.items():
        given: Any = {name: value}
        text = rf"{name} must be .*{listed}.*, got .*('frob'|'reference'|3|int64)"
        with pytest.raises(ValueError, match=text):
            jaxmha.dot_product_attention(x, x, x, **given)
        if name in ("implementation", "return_weights"):
            with pytest.raises(ValueError, match=text):
                jaxmha.multi_head_attention(params, x[:, :, 0], **given)
    layer: Any = {"key": jax.random.key(0), "num_heads": 2, "features": 6}
    with pytest.raises(ValueError, match=r"scheme must be one of \('torch', 'keras', 'flax'\)"):
        jaxmha.init_params(**layer, scheme=value)
    with pytest.raises(ValueError, match=r"qk_norm must be one of \(None, 'layer', 'rms'\)"):
        Semantics(qk_norm=value)
    with pytest.raises(ValueError, match=r"platform must be among \['cpu', 'tpu'"):
        jaxmha.explain(x, x, x, platform=value)


def test_flash_is_not_taken_for_splash() -> None:
    """Splash is a kernel for TPUs."""
    with pytest.raises(ValueError, match=r"got 'flash'(\n|$)"):
        jaxmha.dot_product_attention(**ARRAYS, implementation="flash")


def test_mask_constructors() -> None:
    with pytest.raises(TypeError, match="bias="):
        Mask.dense(zeros(5, 7))
    with pytest.raises(TypeError, match="Boolean"):
        Mask.dense(zeros(5, 7, dtype=np.int32))
    with pytest.raises(ValueError, match="window"):
        Mask.window(1, -1)
    with pytest.raises(TypeError, match=r"key_value must be an array, got list: .*np\.asarray"):
        Mask.padding(key_value=[[True] * 7] * 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got bool: .* Mask\.padding\(query="):
        Mask.lengths(query=zeros(2, 7, dtype=bool))
    with pytest.raises(TypeError, match="key_value_padding must be an array, got list"):
        Mask(key_value_padding=[[True] * 7] * 2)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    assert Mask.window(np.int64(2), None).window_size == (2, None)  # type: ignore[arg-type]
    assert Semantics(scale=np.float32(0.5)).scale == 0.5  # type: ignore[arg-type]
    window: Any = np.int64(2)
    jaxmha.dot_product_attention(**ARRAYS, local_window_size=window, scale=1)


def test_right_arguments_are_not_refused() -> None:
    jaxmha.dot_product_attention(**ARRAYS)


def test_missing_words_are_noticed() -> None:
    with pytest.raises(AssertionError):
        refused(jaxmha.dot_product_attention, ARRAYS | {"is_causal": 1}, TypeError, ["segment"])
    with pytest.raises(TypeError):
        refused(jaxmha.dot_product_attention, ARRAYS | {"is_causal": 1}, ValueError, [])
