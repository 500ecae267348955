"""Exported programs: sizes that are known only when they run."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as flax_linen
from jax import export

import jaxmha
from jaxmha import Mask
from jaxmha.flax import attention_fn, linen
from tests import cases, layer_cases, tolerance
from tests.layer_cases import LAYERS
from tests.test_layer import params_of

# The hook knows sizes as integers only.
pytestmark = pytest.mark.usefixtures("no_shape_hook")


def struct(array: Any, shape: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(shape, array.dtype)


@pytest.mark.parametrize(
    ("implementation", "platform"), [(None, "cpu"), (None, "tpu"), ("reference", "cpu")]
)
def test_attention_with_symbolic_sizes(implementation: str | None, platform: Any) -> None:
    B, T, S = export.symbolic_shape("B, T, S")
    q, k, v = (cases.arrays(cases.Case("export"))[name] for name in ("query", "key", "value"))
    lengths = np.asarray([3, 7], np.int32)

    def attend(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return jaxmha.dot_product_attention(
            q, k, v,
            mask=Mask.lengths(key_value=lengths),
            score_mod=lambda score, b, n, i, j: score * (i - j).astype(score.dtype),
            mask_mod=lambda b, n, i, j: i // 2 + 1 >= j // 2,
            implementation=implementation,
        )  # fmt: skip

    specs = (
        struct(q, (B, T, *q.shape[2:])),
        struct(k, (B, S, *k.shape[2:])),
        struct(v, (B, S, *v.shape[2:])),
        struct(lengths, (B,)),
    )
    with jaxmha.lowering_for(platform):
        made = export.export(jax.jit(attend), platforms=["cpu", "tpu"])(*specs)
    program: Any = export.deserialize(made.serialize())
    tolerance.assert_close(program.call(q, k, v, lengths), np.asarray(attend(q, k, v, lengths)))


def test_layer_with_symbolic_sizes() -> None:
    case = LAYERS[0]
    leaves, inputs, _ = layer_cases.layer_arrays(case)
    params = params_of(leaves)
    B, T, S = export.symbolic_shape("B, T, S")

    def layer(query: Any, key: Any, value: Any) -> Any:
        return jaxmha.multi_head_attention(params, query, key, value)

    sizes = ((B, T), (B, S), (B, S))
    arrays = [inputs[name] for name in ("query", "key", "value")]
    specs = [struct(x, (*s, x.shape[-1])) for x, s in zip(arrays, sizes, strict=True)]
    program: Any = export.export(jax.jit(layer))(*specs)
    tolerance.assert_close(program.call(*arrays), np.asarray(layer(*arrays)))


@pytest.mark.parametrize("swapped", [False, True], ids=["module", "attention_fn"])
def test_flax_modules_with_symbolic_sizes(swapped: bool) -> None:
    module = linen.MultiHeadAttention(num_heads=3, qkv_features=12)
    if swapped:
        module = flax_linen.MultiHeadDotProductAttention(num_heads=3, attention_fn=attention_fn)
    x = np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)
    variables = module.init(jax.random.key(0), x)
    program: Any = export.export(jax.jit(module.apply))(
        jax.tree.map(lambda x: struct(x, x.shape), variables),
        struct(x, (*export.symbolic_shape("B, T"), 6)),
    )
    tolerance.assert_close(program.call(variables, x), np.asarray(module.apply(variables, x)))


def test_features_of_flax_may_be_symbolic() -> None:
    module = linen.MultiHeadAttention(num_heads=3, qkv_features=12)
    x = np.ones((2, 5, 6), np.float32)
    made: Any = export.export(jax.jit(lambda x: module.init(jax.random.key(0), x)))(
        struct(x, (2, 5, *export.symbolic_shape("D")))
    )
    assert made.call(x)["params"]["query"]["kernel"].shape == (6, 3, 4)
