"""Keras on TensorFlow, under `tf.function`."""

from typing import Any

import numpy as np

from jaxmha.bench.case import Case
from jaxmha.bench.data import Array, Data
from jaxmha.bench.program import Program, UnsupportedError
from jaxmha.converters import keras as converter


def program(case: Case, data: Data) -> Program:
    """The program of a layer, or of `keras.ops.dot_product_attention`."""
    import keras

    if keras.backend.backend() != "tensorflow":
        raise UnsupportedError(f"Keras runs on {keras.backend.backend()} here, not on tensorflow")
    if case.dtype != "float32" or case.bias or case.packed or case.window is not None:
        raise UnsupportedError("Keras on TensorFlow is timed in float32, without bias and windows")
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(case.tf32)
    backward, causal = case.direction == "backward", case.is_causal
    loaded = {id(x): tf.constant(x) for x in data.distinct}
    lengths = None if case.lengths is None else tf.constant(case.lengths)
    module = None if data.params is None else converter.to_module(data.params)

    def forward(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        mask = None if lengths is None else tf.range(case.S) < lengths[:, None, None]
        if module is not None:
            options = {"use_causal_mask": causal, "training": False}
            return module(query, value, key, attention_mask=mask, **options)
        mask = None if mask is None else mask[:, None]
        return keras.ops.dot_product_attention(query, key, value, mask=mask, is_causal=causal)

    @tf.function  # type: ignore[untyped-decorator]
    def compute(inputs: Any, lengths: Any, cotangent: Any) -> tuple[Any, Any]:
        place = dict(zip(loaded, inputs, strict=True))
        query, key, value = (place[id(x)] for x in (data.query, data.key, data.value))
        if not backward:
            return forward(query, key, value, lengths), None
        weights = [] if module is None else [v.value for v in module.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            out = forward(query, key, value, lengths)
        return out, tape.gradient(out, [weights, inputs], output_gradients=cotangent)

    inputs, cotangent = list(loaded.values()), tf.constant(data.cotangent)
    compiled: list[Any] = []

    def build() -> None:
        compiled.append(compute.get_concrete_function(inputs, lengths, cotangent))

    def run(calls: int = 1) -> None:
        for _ in range(calls):
            for tensor in tf.nest.flatten(compute(inputs, lengths, cotangent)):
                if tensor is not None:
                    tensor.numpy()  # waits for the result, without a copy

    def outputs(cotangent: Array) -> tuple[Any, Any]:
        out, gradients = compute(inputs, lengths, tf.constant(cotangent))
        if gradients is None:
            return np.asarray(out), None
        return np.asarray(out), [np.asarray(g) for g in gradients[1]]

    return Program(build, run, outputs)
