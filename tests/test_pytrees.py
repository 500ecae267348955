"""Public types as trees of JAX: they print, copy, compare and map whatever their leaves are."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxmha
from jaxmha import Mask
from tests import tolerance
from tests.public_trees import BLOCKS, LATENT, MASKS, PARAMS, RECORDS, TREES

# No leaf is an array that these trees could be called with.
pytestmark = pytest.mark.usefixtures("no_shape_hook")


def donated(tree: Any) -> Any:
    def delete(x: Any) -> Any:
        array = jnp.array(x)
        array.delete()
        return array

    return jax.tree.map(delete, tree)


SPEC: Any = PartitionSpec
LEAVES: dict[str, Callable[[Any], Any]] = {
    "shapes": lambda tree: jax.eval_shape(lambda: tree),
    "donated": donated,
    "None": lambda tree: jax.tree.map(lambda _: None, tree),
    "integers": lambda tree: jax.tree.map(lambda _: 0, tree),
    "strings": lambda tree: jax.tree.map(lambda _: "frozen", tree),
    "specs": lambda tree: jax.tree.map(lambda _: SPEC(("a", "b"), None), tree),
    "stacked": lambda tree: jax.tree.map(lambda x: np.stack([x, x, x]), tree),
    "numbers": lambda tree: jax.tree.map(lambda x: np.ravel(x)[:1].sum(), tree),
}


structure: Any = jax.tree.structure


def shown(tree: Any) -> list[str]:
    return [repr(tree), str(tree), getattr(tree, "_repr_html_", str)()]


@pytest.mark.parametrize("name", TREES)
def test_prints_whatever_the_leaves_are(name: str) -> None:
    for leaves in LEAVES.values():
        for text in shown(leaves(TREES[name])):
            assert text is not None
    jax.eval_shape(lambda tree: (shown(tree), tree)[1], TREES[name])  # traced


def test_masks_without_values_print_their_conditions() -> None:
    text = "Mask(causal_offset=0, query_lengths=int32[2], key_value_lengths=int32[2])"
    for leaves in ("shapes", "donated"):
        assert shown(LEAVES[leaves](MASKS["lengths"]))[:2] == [text, text]
    unfit = MASKS["padding"] & Mask.lengths(key_value=np.asarray([1, 2, 3]))
    assert str(unfit) == repr(unfit)


def test_donated_arrays_print_by_shape() -> None:
    cache = RECORDS["cache"]
    assert repr(donated(cache)).endswith("lengths=<donated int32[2]>)")
    assert repr(cache).endswith("lengths=Array([0, 0], dtype=int32))")


def test_a_table_shows_leaves_without_a_shape() -> None:
    assert "((&#x27;a&#x27;, &#x27;b&#x27;), None)" in LEAVES["specs"](PARAMS)._repr_html_()
    assert "0 parameters" in LEAVES["specs"](PARAMS)._repr_html_()


@pytest.mark.parametrize("name", TREES)
def test_paths_name_the_fields(name: str) -> None:
    paths = [jax.tree_util.keystr(x) for x, _ in jax.tree_util.tree_leaves_with_path(TREES[name])]
    assert not [path for path in paths if "flat index" in path]
    if name == "lengths":
        assert paths == [".query_lengths", ".key_value_lengths"]


@pytest.mark.parametrize("name", TREES)
def test_copies(name: str) -> None:
    tree = TREES[name]
    copies = [copy.copy(tree), copy.deepcopy(tree)]
    if name in BLOCKS:
        with pytest.raises(TypeError, match="cannot be pickled: pickle the arrays"):
            pickle.dumps(tree)
    else:
        copies.append(pickle.loads(pickle.dumps(tree)))
    for again in copies:
        jax.tree.map(tolerance.assert_same, again, tree)


@pytest.mark.parametrize("name", TREES)
def test_maps_keep_the_structure(name: str) -> None:
    """Maps to integers, such as `in_axes`, and to None keep the type and its fields."""
    tree = TREES[name]
    assert structure(jax.tree.map(lambda _: 0, tree)) == structure(tree)

    def missing(x: object) -> bool:
        return x is None

    named = jax.tree.map(lambda _: "leaf", tree, is_leaf=missing)
    assert len(jax.tree.leaves(named)) == len(jax.tree.leaves(tree, is_leaf=missing))


def test_a_tree_of_axes_for_vmap() -> None:
    mask = MASKS["offsets"]
    axes = jax.tree.map(lambda _: 0, mask)
    each = jax.jit(jax.vmap(lambda mask: mask.to_array(3, 5)[0, 0], in_axes=(axes,)))(mask)
    tolerance.assert_same(each, mask.to_array(3, 5, np)[:, 0])


def test_equal_masks_are_one_static_argument() -> None:
    """Integers compare by value, and arrays, which may be traced, by identity."""
    lengths = np.asarray([3, 1], np.int32)
    makers: list[Any] = [
        Mask,
        Mask.causal,
        lambda: Mask.window(2, None) & Mask.lengths(query=lengths),
    ]
    for make in makers:
        assert make() == make()
        assert hash(make()) == hash(make())
    assert Mask.causal() != Mask.causal(1)
    assert Mask.causal() != Mask.window(None, 0)
    assert Mask.lengths(query=lengths) != Mask.lengths(query=lengths.copy())
    assert Mask() != None
    materialise: Any = jax.jit(lambda mask: mask.to_array(3, 5), static_argnums=0)
    materialise(Mask.causal())
    materialise(Mask.causal())
    assert materialise._cache_size() == 1


@pytest.mark.parametrize("kernel", ["query", "key", "value", "out"])
@pytest.mark.parametrize("params", [PARAMS, LATENT], ids=["params", "latent"])
def test_a_missing_kernel_is_named(params: Any, kernel: str) -> None:
    """As in a tree whose kernels were partitioned off."""
    part = getattr(params, kernel)._replace(kernel=None)
    x = np.ones((2, 3, 6 if params is PARAMS else 7), np.float32)
    call: Any = jaxmha.multi_head_attention if params is PARAMS else jaxmha.latent_attention
    with pytest.raises(TypeError, match=f"params.{kernel}.kernel must be an array, got None"):
        call(params._replace(**{kernel: part}), x)
    if kernel != "out":
        with pytest.raises(TypeError, match=f"params.{kernel} must be a Projection, got NoneType"):
            call(params._replace(**{kernel: None}), x)


def test_values_are_needed() -> None:
    shapes = jax.eval_shape(lambda: RECORDS["paged"])
    with pytest.raises(TypeError, match=r"cache.table must be an array with values, got Shape"):
        jaxmha.PagePool(shapes)
    frequencies = jaxmha.rope_frequencies({"rope_theta": 100.0}, 4)
    x, positions = np.ones((1, 3, 2, 4), np.float32), np.arange(3)
    with pytest.raises(TypeError, match="frequencies must be static, got traced ones"):
        jax.jit(lambda f: jaxmha.rope(x, positions, frequencies=f))(frequencies)


# Orbax saves no array without entries, and no tree without arrays.
SAVED = [x for x in TREES if (held := jax.tree.leaves(TREES[x])) and all(y.size for y in held)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_orbax_restores_the_tree(name: str, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    tree = jax.tree.map(jnp.asarray, TREES[name])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", tree)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        again = checkpointer.restore(tmp_path / "tree", shapes)
    jax.tree.map(tolerance.assert_same, again, tree)
    assert structure(again) == structure(tree)
