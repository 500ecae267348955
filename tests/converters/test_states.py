"""Nested trees are imported as flat dicts are; other prefixes and separators are named."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch as torch_library
from flax import linen, nnx, traverse_util

from jaxmha import checkpoint
from jaxmha.converters import flax, torch
from jaxmha.converters.layout import latent, states
from jaxmha.converters.migrate import pipeline
from tests import drawn

D, N = 6, 2


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    """The parameters of a linen layer, nested."""
    layer = linen.MultiHeadDotProductAttention(num_heads=N)
    x = np.ones((1, 3, D), np.float32)
    made: dict[str, Any] = layer.init(jax.random.key(0), x, x)["params"]
    return made


def same(params: Any, tree: Mapping[str, Any]) -> bool:
    return np.array_equal(params.query.kernel, tree["query"]["kernel"]) and np.array_equal(
        params.out.bias, tree["out"]["bias"]
    )


def test_nested_trees_are_imported(tree: dict[str, Any]) -> None:
    flat = traverse_util.flatten_dict(tree)
    whole = {"params": {"encoder": tree}}
    for state, prefix in (
        (tree, ""),
        (linen.FrozenDict(tree), ""),
        (flat, ""),
        (whole, "params/encoder"),
        (traverse_util.flatten_dict(whole), "params/encoder/"),
    ):
        assert same(flax.import_params(state, prefix=prefix)[0], tree)
    made = pipeline.convert_state(whole, to="jaxmha")
    np.testing.assert_array_equal(made["params.encoder.query_kernel"], tree["query"]["kernel"])


def test_states_of_nnx_are_imported(tree: dict[str, Any]) -> None:
    layer = nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0))
    expected, _ = flax.from_module(layer)
    for state in (nnx.state(layer), nnx.to_pure_dict(nnx.state(layer))):
        params, _ = flax.import_params(state)
        np.testing.assert_array_equal(params.query.kernel, expected.query.kernel)
    traced = jax.jit(lambda state: flax.import_params(state)[0].query.kernel)
    np.testing.assert_array_equal(traced(nnx.state(layer)), expected.query.kernel)


def test_nested_tensors_and_latent_attention_are_imported() -> None:
    layer = torch_library.nn.MultiheadAttention(16, N)
    nested = {"encoder": {0: layer.state_dict()}}
    for copy in (True, False):
        with torch_library.no_grad():
            params, _ = torch.import_params(nested, num_heads=N, prefix="encoder.0", copy=copy)
        assert params.out is not None
        np.testing.assert_array_equal(params.out.bias, layer.out_proj.bias.detach())
    made = drawn.latent_params(num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5)
    state = latent.export_latent_params(made)
    again = latent.import_latent_params({"attn": state}, prefix="attn")
    np.testing.assert_array_equal(again.key.kernel, made.key.kernel)


def test_a_checkpoint_is_read_only_under_the_prefix(tree: dict[str, Any], tmp_path: Path) -> None:
    flat = states.flat({"a": tree}, "/")
    checkpoint.write(tmp_path / "a.npz", {**flat, "big": np.ones(7, np.float32)})
    with checkpoint.open(tmp_path / "a.npz") as file:
        read: list[str] = []

        class Watched(Mapping[str, Any]):
            def __getitem__(self, name: str) -> Any:
                read.append(name)
                return file[name]

            def __iter__(self) -> Any:
                return iter(file)

            def __len__(self) -> int:
                return len(file)

        assert same(flax.import_params(Watched(), prefix="a")[0], tree)
    assert "big" not in read


def test_other_prefixes_and_separators_are_named(tree: dict[str, Any]) -> None:
    flat = states.flat(tree, "/")
    below = {f"params/{n}/{key}": x for n in range(4) for key, x in flat.items()}
    expected = (
        "layout flax has them under 'params/0', 'params/1', 'params/2' and 1 more: pass prefix"
    )
    for prefix in ("", "params", "params.0"):
        with pytest.raises(ValueError, match=f"{expected}='params/0'"):
            flax.import_params(below, prefix=prefix)
    dotted = {key.replace("/", "."): x for key, x in flat.items()}
    with pytest.raises(
        ValueError, match=r"joined by '.': pass {key.replace\('.', '/'\): array for"
    ):
        flax.import_params(dotted)
    assert same(flax.import_params({k.replace(".", "/"): a for k, a in dotted.items()})[0], tree)
    with pytest.raises(ValueError, match=r"lacks query/kernel, [^;]*$"):
        flax.import_params({"other": np.ones(3)})


def test_wrong_states_and_prefixes_are_refused() -> None:
    wrong: tuple[tuple[Any, str], ...] = (
        ("a.npz", "got str: for a file pass dict"),
        (Path("a.npz"), "jaxmha.checkpoint.open"),
        ([1], "got list: for a live layer call from_module"),
        ({3.5: {"a": 1}}, "strings, or tuples of them, got 3.5"),
    )
    for state, expected in wrong:
        for import_params in (torch.import_params, flax.import_params):
            with pytest.raises(TypeError, match=expected):
                import_params(state, num_heads=N)
    with pytest.raises(TypeError, match="prefix: expected a string, got tuple"):
        flax.import_params({}, prefix=("a", "b"))  # type: ignore[arg-type]


def test_lists_within_trees_have_indices_as_keys(tree: dict[str, Any]) -> None:
    other = jax.tree.map(np.zeros_like, tree)
    for layers in ([other, tree], (other, tree)):
        state = {"model": {"layers": layers}}
        assert same(flax.import_params(state, prefix="model/layers/1")[0], tree)


@pytest.mark.parametrize("box", [linen.Partitioned, linen.LogicallyPartitioned])
def test_boxes_of_linen_are_unboxed(box: Any, tree: dict[str, Any]) -> None:
    boxed = jax.tree.map(lambda x: box(x, (None,) * x.ndim), tree)
    for state in (boxed, traverse_util.flatten_dict(boxed, sep="/")):
        assert same(flax.import_params(state)[0], tree)
