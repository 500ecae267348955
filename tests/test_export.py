"""Exported programs: sizes that are known only when they run, and public types in a file."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as flax_linen
from jax import export
from jax._src import tree_util as registered
from jax._src.export import _export

import jaxmha
from jaxmha import Mask
from jaxmha.flax import attention_fn, linen
from tests import cases, layer_cases, tolerance
from tests.layer_cases import LAYERS
from tests.public_trees import BLOCKS, EXPORTED
from tests.test_layer import params_of

# The hook knows sizes as integers only.
pytestmark = pytest.mark.usefixtures("no_shape_hook")


def struct(array: Any, shape: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(shape, array.dtype)


@pytest.mark.slow_variants("reference*")
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
    want = jax.jit(attend)(q, k, v, lengths)
    tolerance.assert_close(program.call(q, k, v, lengths), np.asarray(want))


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
    tolerance.assert_close(program.call(*arrays), np.asarray(jax.jit(layer)(*arrays)))


@pytest.mark.parametrize("swapped", [False, True], ids=["module", "attention_fn"])
def test_flax_modules_with_symbolic_sizes(swapped: bool) -> None:
    module = linen.MultiHeadAttention(num_heads=3, qkv_features=12)
    if swapped:
        module = flax_linen.MultiHeadDotProductAttention(num_heads=3, attention_fn=attention_fn)
    x = np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)
    rng = np.random.default_rng(1)
    variables = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype),
        jax.eval_shape(module.init, jax.random.key(0), x),
    )
    program: Any = export.export(jax.jit(module.apply))(
        jax.tree.map(lambda x: struct(x, x.shape), variables),
        struct(x, (*export.symbolic_shape("B, T"), 6)),
    )
    tolerance.assert_close(
        program.call(variables, x), np.asarray(jax.jit(module.apply)(variables, x))
    )


def test_features_of_flax_may_be_symbolic() -> None:
    module = linen.MultiHeadAttention(num_heads=3, qkv_features=12)
    x = np.ones((2, 5, 6), np.float32)
    made: Any = export.export(jax.jit(lambda x: module.init(jax.random.key(0), x)))(
        struct(x, (2, 5, *export.symbolic_shape("D")))
    )
    assert made.call(x)["params"]["query"]["kernel"].shape == (6, 3, 4)


@pytest.mark.parametrize("name", EXPORTED)
def test_public_types_are_arguments_and_results(name: str) -> None:
    tree = EXPORTED[name]
    made = export.export(jax.jit(lambda tree: tree))(tree)
    program: Any = export.deserialize(made.serialize())
    assert program.in_tree == made.in_tree
    again = program.call(tree)
    structure: Any = jax.tree.structure
    assert structure(again) == structure(tree)
    jax.tree.map(tolerance.assert_same, again, tree)


def public_trees() -> set[type[Any]]:
    """The public classes whose instances are trees of arrays or static."""
    faces = (jaxmha, jaxmha.latent, jaxmha.mods)
    found = [getattr(face, name) for face in faces for name in face.__all__]
    classes = {x for x in found if isinstance(x, type)}
    return {x for x in classes if hasattr(x, "_fields") or x in registered._registry}


def test_every_public_tree_is_exported() -> None:
    rotation_of_queries = jaxmha.latent.ScaledQueries  # holds a function
    exported = {type(tree) for tree in EXPORTED.values()}
    assert public_trees() - exported == {jaxmha.mods.BlockMask, rotation_of_queries}


def test_a_block_mask_is_no_argument() -> None:
    made = export.export(jax.jit(lambda tree: tree))(BLOCKS["blocks"])
    with pytest.raises(TypeError, match="Let the exported function close over it"):
        made.serialize()


def test_fields_of_other_versions() -> None:
    """A field that an older version lacks is no obstacle while it is None; a default fills it in."""
    _, read, build = _export.deserialization_registry["jaxmha.Projection"]
    assert build(read(b'{"fields": ["kernel"]}'), [0.0]) == jaxmha.Projection(0.0)  # type: ignore[arg-type]
    later = read(b'{"fields": ["kernel", "bias", "scale"]}')
    assert build(later, [0.0, 0.0, None]) == jaxmha.Projection(0.0, 0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"jaxmha.Projection with scale, .* no such field"):
        build(later, [0.0, 0.0, 0.0])
    _, read, build = _export.deserialization_registry["jaxmha.Semantics"]
    assert build(read(b'{"scale": 0.5, "later": null, "precision": null}'), []).scale == 0.5
    with pytest.raises(ValueError, match=r"jaxmha.Semantics with later, .* no such field"):
        build(read(b'{"later": 1}'), [])


READER = """
import sys
import jax, numpy as np
import jaxmha
from jax import export
program = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
params = jaxmha.init_params(jax.random.key(0), num_heads=2, features=6)
x = np.linspace(-1, 1, 2 * 3 * 6, dtype=np.float32).reshape(2, 3, 6)
mask = jaxmha.Mask.causal() & jaxmha.Mask.lengths(key_value=np.asarray([3, 1]))
out, cache = program.call(params, x, jaxmha.KVCache.empty(params, 2, 5), mask=mask)
assert isinstance(cache, jaxmha.KVCache)
np.save(sys.argv[2], out)
"""


@pytest.mark.slow
def test_another_process_calls_an_exported_function(tmp_path: Path) -> None:
    params = jaxmha.init_params(jax.random.key(0), num_heads=2, features=6)
    x = np.linspace(-1, 1, 2 * 3 * 6, dtype=np.float32).reshape(2, 3, 6)
    mask = Mask.causal() & Mask.lengths(key_value=np.asarray([3, 1]))
    step = jax.jit(jaxmha.prefill)
    cache = jaxmha.KVCache.empty(params, 2, 5)
    made = export.export(step)(params, x, cache, mask=mask)
    (tmp_path / "program").write_bytes(made.serialize())
    command = [sys.executable, "-c", READER, str(tmp_path / "program"), str(tmp_path / "out.npy")]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
    out, _ = step(params, x, cache, mask=mask)
    tolerance.assert_close(np.load(tmp_path / "out.npy"), np.asarray(out))
