"""Every layout of every module: round trip, how it is written, and where it is found."""

import ast
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import MHAParams, checkpoint
from jaxmha.converters.discovery import attention_blocks
from jaxmha.converters.layout import (
    by_hand,
    linear,
    meaning,
    registry,
    transform,
)
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.layout.base import Layout
from jaxmha.params import CANONICAL, field_of, from_leaves
from tests.converters import layers

N, K, H = 6, 3, 4
TABLES: list[Any] = [table for table in vars(registry).values() if hasattr(table, "LAYOUTS")]
EVERY = pytest.mark.parametrize("layout", registry.LAYOUTS)


def params_of(
    layout: Layout, lead: tuple[int, ...] = (), seed: int = 0, dtype: str = "float32"
) -> MHAParams:
    """Random leaves of every kind that the layout has, of sizes that it can hold."""
    free = {"Dq": 13, "Dk": 17, "Dv": 19, "Do": 23, "N": N, "K": K, "H": H, "h": 5}
    for letter, (tied, _) in layout.ties.items():
        free[letter] = int(np.prod([free[a] for a in tied.split()]))
    for letter, (tied, _) in layout.ties.items():  # ties of ties
        free[letter] = int(np.prod([free[a] for a in tied.split()]))
    rng = np.random.default_rng(seed)
    held = {leaf for entry in layout.entries for leaf in entry.leaves}
    held -= {leaf for leaf in held if field_of(leaf) != leaf and field_of(leaf) in held}
    shapes = {
        leaf: [free[a] for a in CANONICAL[leaf].split()] for leaf in CANONICAL if leaf in held
    }
    arrays: dict[str, Any] = {
        leaf: rng.normal(size=(*lead, *shape)).astype(layers.numpy_dtype(dtype))
        for leaf, shape in shapes.items()
    }
    return from_leaves(arrays)


def exported(
    name: str, prefix: str, seed: int = 0, lead: tuple[int, ...] = ()
) -> dict[str, NDArray]:
    """Random arrays of a block in a layout."""
    layout = attention_blocks.named(name)
    params = params_of(layout, lead, seed)
    return transform.export_params(layout, params, layout.semantics, prefix=prefix)


def model_file(path: Path, state: Mapping[str, NDArray], config: Any = None) -> Path:
    """A checkpoint, next to a configuration if there is one."""
    checkpoint.write(path, state, force=True)
    if config is not None:
        path.with_name("config.json").write_text(json.dumps(config))
    return path


@pytest.mark.slow_variants("float64*")
@EVERY
@pytest.mark.parametrize(
    ("lead", "dtype"),
    [((), "float32"), ((), "float64"), ((3,), "bfloat16"), ((2, 3), "float16")],
    ids=["single", "float64", "stacked", "twice stacked"],
)
def test_round_trip(layout: Layout, lead: tuple[int, ...], dtype: str) -> None:
    params = params_of(layout, lead, dtype=dtype)
    for prefix in ("", "a", f"a{layout.separator}") if dtype == "float32" else ("a.b/c",):
        state = transform.export_params(layout, params, layout.semantics, prefix=prefix)
        assert all(key.startswith(prefix) for key in state)
        others = {"another/model/kernel": np.ones(3)} if prefix else {}
        either = f"a{layout.separator}" if prefix == "a" else prefix  # with a separator or without
        again, semantics = transform.import_params(
            registry.LAYOUTS, state | others, layout=layout.name, num_heads=N, prefix=either
        )
        assert semantics == layout.semantics
        layers.assert_identical(params, again)
        back = transform.export_params(layout, again, layout.semantics, prefix=prefix)
        layers.assert_identical(state, back)


# Layout -> a prefix by which it differs from others with the same keys, and an array next to it.
PLACES = {
    "chatglm": ("transformer.encoder.layers.0.self_attention", "other"),
    "megatron": ("decoder.layers.0.self_attention", "other"),
    "llama-across": ("cross_attn", "other"),
    "timm-heads": ("blocks.0.attn_block.attn", "rel_pos.mlp.fc1.weight"),
    "timm-heads-conv": ("stages.0.blocks.0.attn", "rel_pos.mlp.fc1.weight"),
    "timm-nest": ("levels.0.transformer_encoder.0.attn", "other"),
    "x-transformers": ("attn_layers.layers.0.1", "other"),
}


@EVERY
def test_is_found_in_a_file(layout: Layout) -> None:
    prefix, near = PLACES.get(layout.name, ("x", "other"))
    state = transform.export_params(layout, params_of(layout), layout.semantics, prefix=prefix)
    near = layout.path(prefix, near) if near != "other" else near
    found = attention_blocks.find({near: (2, 3)} | {k: array.shape for k, array in state.items()})
    assert [(block.prefix, block.layout.name) for block in found] == [(prefix, layout.name)]


def test_tables_are_small() -> None:
    """No statement that writes a table has more than 15 lines; the transform has about 100."""
    names = [layout.name for table in TABLES for layout in table.LAYOUTS]
    assert sorted(names) == sorted(layout.name for layout in registry.LAYOUTS)
    assert all(layout.about for layout in registry.LAYOUTS)
    for table in TABLES:
        source = inspect.getsource(table)
        tables = [
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign)
            and re.search(r"Entry\(|Layout\(|entries=", ast.unparse(node))
        ]
        made = len([*by_hand.BY_HAND, *linear.UNEVEN]) + 2 if table is linear else 0  # of names
        made += len(meaning.LLAMA_MEANING) if table is meaning else 0  # rows of one table
        assert len(tables) + made >= len(table.LAYOUTS)
        for node in tables:
            assert length(node) <= 15, ast.unparse(node.targets[0])
    functions = [
        n for n in ast.parse(inspect.getsource(transform)).body if isinstance(n, ast.FunctionDef)
    ]
    documentation = [n.body[0] for n in functions if ast.get_docstring(n)]
    assert sum(map(length, functions)) - sum(map(length, documentation)) <= 100


def length(node: ast.stmt) -> int:
    """Lines of a statement in its file."""
    return (node.end_lineno or 0) - node.lineno + 1
