"""Calls every documented function for Keras on the backend that KERAS_BACKEND names.

A program of its own, because Keras chooses its backend once per process: it prints the name of
every check that passes.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
import torch
from keras.src.utils import module_utils

import jaxmha
from jaxmha.cli import like
from jaxmha.converters import attribute, lint_masks
from jaxmha.converters import keras as converter
from jaxmha.converters import torch as of_torch
from jaxmha.converters.layout.arrays import NDArray, framework_of, to_numpy
from jaxmha.converters.matching import match, prove
from jaxmha.converters.verify import compare
from jaxmha.params import leaves

B, T, S, D, N, H = 2, 5, 7, 11, 3, 2
RNG = np.random.default_rng(0)
QUERY, VALUE = (RNG.normal(size=(B, length, D)).astype("float32") for length in (T, S))
VALID = np.arange(S) < np.array([[S], [3]])
ATTENDED = np.broadcast_to(VALID[:, None], (B, T, S)) & (np.arange(T) != 2)[:, None]


def drawn(layer: Any) -> Any:
    """The layer, with random weights."""
    for variable in layer.trainable_variables:
        variable.assign(RNG.normal(size=variable.shape))
    return layer


def attention(kind: str = "mha", dtype: str = "float32", **settings: Any) -> Any:
    made = (
        keras.layers.MultiHeadAttention(N, H, dtype=dtype, **settings)
        if kind == "mha"
        else keras.layers.GroupQueryAttention(H, 2 * N, N, dtype=dtype, **settings)
    )
    made.build((B, T, D), (B, S, D))
    return drawn(made)


def model() -> Any:
    """Two attention layers, and two dense layers of one shape; names tell them apart."""
    x = inputs = keras.Input((S, D))
    x = x + keras.layers.MultiHeadAttention(N, H, dropout=0.1, seed=3, name="zz")(x, x)
    x = x + keras.layers.GroupQueryAttention(H, 2 * N, N, name="grouped")(x, x)
    x = keras.layers.Dropout(0.5)(keras.layers.Dense(D, name="up")(x))
    return drawn(keras.Model(inputs, keras.layers.Dense(D, name="down")(x)))


def forward_inputs(rng: np.random.Generator) -> tuple[NDArray, ...]:
    return (rng.normal(size=(B, S, D)).astype("float32"),)


def call(layer: Any, query: NDArray, value: NDArray, **options: Any) -> NDArray:
    return to_numpy(layer(query, value, training=False, **options))


def a_layer_makes_the_round_trip() -> None:
    for kind, dtype, settings in (
        ("mha", "float32", {"dropout": 0.25, "seed": 3}),
        ("mha", "bfloat16", {"use_bias": False}),
        ("mha", "float16", {"use_gate": True}),
        ("gqa", "float32", {"dropout": 0.25, "sliding_window": 2}),
    ):
        layer = attention(kind, dtype, **settings)
        layer.trainable = dtype == "float32"
        params, semantics = converter.from_module(layer)
        assert semantics.dropout_rate == settings.get("dropout", 0.0)
        variables = {"/".join(w.path.split("/")[-2:]): w for w in layer.weights}
        layout = converter.VARIABLES if kind == "mha" else converter.GROUPED
        imported, _ = converter.import_params(variables, layout=layout.name)
        again, same = converter.from_module(converter.to_module(params, semantics, like=layer))
        assert same == semantics
        for one in (imported, again):
            assert all(
                leaves(one)[name].tobytes() == array.tobytes()
                for name, array in leaves(params).items()
            ), (kind, dtype)


def outputs_are_those_of_jaxmha() -> None:
    for kind in ("mha", "gqa"):
        layer = attention(kind)
        params, _ = converter.from_module(layer)
        for path, options in (("fused", {}), ("scores", {"return_attention_scores": True})):
            theirs = to_numpy(next(_parts(layer(QUERY, VALUE, attention_mask=ATTENDED, **options))))
            preset: Any = jaxmha.Semantics.keras(path)  # type: ignore[arg-type]
            mask = ATTENDED[:, None]
            ours = jaxmha.multi_head_attention(params, QUERY, VALUE, mask=mask, semantics=preset)
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


def _parts(output: Any) -> Iterator[Any]:
    yield from output if isinstance(output, tuple | list) else (output,)


def masks_are_read_and_written() -> None:
    of_backend = keras.ops.convert_to_tensor(VALID)
    mask, bias = converter.import_masks(value_mask=of_backend, use_causal_mask=True)
    assert mask is not None
    assert bias is None
    assert np.array_equal(np.asarray(mask.to_array(T, S))[:, 0], np.tri(T, S) * VALID[:, None])
    written = converter.export_masks(mask, query_length=T, key_length=S)
    layer, given = attention(), {"value_mask": of_backend, "use_causal_mask": True}
    np.testing.assert_array_equal(
        call(layer, QUERY, VALUE, **written), call(layer, QUERY, VALUE, **given)
    )
    empty = keras.ops.convert_to_tensor(ATTENDED)
    assert "empty rows" in str(lint_masks("keras", attention_mask=empty))


def masks_of_tensors_are_noted() -> None:
    ids = keras.Input((S,), dtype="int32")
    x = keras.layers.Embedding(S, D, mask_zero=True)(ids)
    first, second = (keras.layers.MultiHeadAttention(N, H, name=name) for name in "ab")
    made = keras.Model(ids, second(first(x, x), x))
    arrived = converter.implicit_masks(made, np.where(VALID, 1, 0))
    assert [one.layer for one in arrived] == ["a", "b"]
    np.testing.assert_array_equal(arrived[0].arguments["value_mask"], VALID)
    assert arrived[1].lost == ("value_mask",)


def differences_are_attributed() -> None:
    for dtype in ("float32", "float16"):
        layer = attention(dtype=dtype)
        params, semantics = converter.from_module(layer)
        given = tuple(x.astype(dtype) for x in (QUERY, VALUE, VALUE))
        for scores in (False, True):
            masks = {"attention_mask": ATTENDED, "return_attention_scores": scores}
            found = attribute(
                layer,
                (params, semantics),
                given,
                masks_a=masks,
                masks_b={"mask": ATTENDED[:, None]},
            )
            names = [part.name for part in found.parts]
            assert "unexplained" not in names, (dtype, str(found))
            assert ("fully masked rows" in names) == (not scores), (dtype, str(found))
    assert attribute(attention(), attention()).parts


def a_model_is_filled_from_each_source() -> None:
    source = model()
    with tempfile.TemporaryDirectory() as folder:
        source.save_weights(f"{folder}/model.weights.h5")
        source.save(f"{folder}/model.keras")
        state = dict(converter.tensors_of(source).state)
        for given in (source, state, Path(folder, "model.keras")):
            filled = converter.load_into(model(), given)
            proof = prove(given, filled)
            assert proof.same, str(proof)
            mine, theirs = (to_numpy(x(VALUE, training=False)) for x in (filled, source))
            np.testing.assert_array_equal(mine, theirs)
        assert "identical" in str(compare(Path(folder, "model.weights.h5"), source))
    module = torch.nn.Sequential(torch.nn.Linear(D, T), torch.nn.Linear(T, D))
    dense = keras.Sequential([keras.Input((S, D)), keras.layers.Dense(T), keras.layers.Dense(D)])
    assert prove(module, converter.load_into(dense, module), inputs=forward_inputs).same
    assert match(dense, module).lines


def a_proof_names_the_layer_that_departs() -> None:
    source, other = model(), model()
    converter.load_into(other, source)
    proof = prove(source, other, inputs=forward_inputs)
    assert proof.same, str(proof)
    assert proof.compared > 8
    kernel = other.get_layer("up").kernel
    kernel.assign(to_numpy(kernel) * 2)
    proof = prove(source, other, inputs=forward_inputs)
    assert proof.different == ("up/kernel",)
    assert proof.departure is not None
    assert proof.departure.source == "up"


def layers_and_models_are_of_keras() -> None:
    made = model()
    assert framework_of(made) == framework_of(made.get_layer("zz")) == "keras"
    assert [name for name, _ in converter.attention_layers(made)] == ["zz", "grouped"]
    assert like._about(made, Path("model.safetensors")) == {}
    found = compare(made, converter.load_into(model(), made))
    assert found.same, str(found)


def other_layers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"from_module of jaxmha\.converters\.keras"):
        of_torch.from_module(attention())
    layer = attention()
    layer._query_dense.enable_lora(2)
    with pytest.raises(ValueError, match="lora_kernel_a"):
        converter.from_module(layer)
    if keras.backend.backend() == "torch":  # a layer is a module of torch
        hooked, below, replaced = (attention() for _ in range(3))
        hooked.register_forward_pre_hook(lambda *_: None)
        below._softmax.register_forward_hook(lambda *_: None)
        replaced.forward = lambda *x, **named: 2 * type(replaced).forward(replaced, *x, **named)
        for one, message in (
            (hooked, "layer has forward hooks"),
            (below, "layer._softmax has forward hooks"),
            (replaced, "object has a forward of its own"),
        ):
            with pytest.raises(ValueError, match=message):
                converter.from_module(one)


CHECKS = (
    a_layer_makes_the_round_trip, outputs_are_those_of_jaxmha, masks_are_read_and_written,
    masks_of_tensors_are_noted, differences_are_attributed, a_model_is_filled_from_each_source,
    a_proof_names_the_layer_that_departs, layers_and_models_are_of_keras, other_layers_are_refused,
)  # fmt: skip

if __name__ == "__main__":
    if keras.backend.backend() != "tensorflow":
        # Keras would import TensorFlow, which takes seconds, to look for its types.
        vars(module_utils.tensorflow)["_available"] = False
    jax.config.update("jax_disable_most_optimizations", True)  # type: ignore[no-untyped-call]
    for check in CHECKS:
        check()
        print(keras.backend.backend(), check.__name__, flush=True)
