"""A -> B -> A keeps every tensor's name, dtype, shape and bytes, whatever holds the content.

Random layouts, formats, dtypes, other layers and key orders; what B cannot hold is refused.
"""

import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from jaxmha import checkpoint
from jaxmha.converters import keras
from jaxmha.converters.discovery import attention_blocks, layer_layouts, places
from jaxmha.converters.layout import meaning, registry, validation
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.migrate import pipeline
from tests.converters.test_every_layout import N, exported, params_of

INDEX = (".safetensors.index.json", ".bin.index.json")
SUFFIXES = (".safetensors", ".pt", ".npz", ".weights.h5", ".orbax", *INDEX)
DTYPES = ("float32", "float16", "float64", "bfloat16")
IN_FILE = {layout.name for layout, _ in keras.IN_FILE.values()}
Case = tuple[str, str]  # layout, suffix
# .weights.h5 files hold Keras layouts alone, and others do not. Their groups (layers/dense) come
# back from no other format: classes written by hand have them in test_by_hand.
CASES = [
    (layout.name, suffix)
    for layout in registry.LAYOUTS
    for suffix in SUFFIXES
    if (suffix == ".weights.h5") == (layout.name in IN_FILE)
    and (layout.name in IN_FILE or not layout.name.endswith("-file"))
]


def source(layout: Layout, dtype: str, rng: np.random.Generator, lead: bool) -> dict[str, NDArray]:
    """Two blocks, the other layers that the layout's framework has, and what nobody understands."""
    state: dict[str, NDArray] = {}
    convention = layer_layouts.convention_of(layout.name)
    s = layout.separator
    groups = {x.name: group for x, group in keras.IN_FILE.values()}
    for i in range(2):
        prefix = f"model{s}{i}{s}attn"
        if layout.name in groups:
            prefix = f"layers/{groups[layout.name]}{'_1' * i}"
        state |= exported(layout.name, prefix, i, (2,) * lead)
        for kind, entries in (convention.kinds if convention else {}).items():
            if kind == "conv1d" or (kind == "convolution" and convention is layer_layouts.TORCH):
                continue  # told by a family alone: `test_families`
            assert convention is not None
            name = {"embedding": "embed", "rmsnorm": "rms_norm"}.get(kind, kind)
            at = f"model{s}{i}{s}{name}"
            if convention.group:
                at = f"layers/{convention.group[kind]}{'_1' * i}"
            sizes = {"Di": 3, "Do": 5, "V": 7, "D": 11, "y": 2, "x": 3}
            for entry in entries:
                shape = layer_layouts.shape(entry, sizes)
                state[f"{at}{convention.separator}{entry.key}"] = rng.normal(size=shape)
    state = {name: x.astype(dtype) for name, x in state.items()}
    state["a/buffer.of-integers"] = rng.integers(0, 9, (3, 2))
    state["step"] = np.array(17)
    names = list(state)
    rng.shuffle(names)
    return {name: state[name] for name in names}


def bits(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with checkpoint.open(path) as file:
        return {k: (file[k].dtype.name, file[k].shape, file[k].tobytes()) for k in file}


def back_and_forth(a: Case, b: Case, dtype: str, seed: int, lead: bool = False) -> bool:
    """True if B could hold it; then all must be as it was."""
    rng = np.random.default_rng(seed)
    layout = attention_blocks.named(a[0])
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}{suffix}" for i, suffix in enumerate((a[1], b[1], a[1]))]
        try:
            checkpoint.write(paths[0], source(layout, dtype, rng, lead))
        except checkpoint.UnsupportedDtype:
            return False
        counts: list[dict[str, Any]] = [
            ({} if attention_blocks.named(x).stores_num_heads else {"num_heads": N})
            for x in (a[0], b[0])
        ]
        parts: list[dict[str, Any]] = [
            ({"shard_size": 5000} if x in INDEX else {}) for x in (a[1], b[1])
        ]
        if a[0] in meaning.ASKING:  # no file tells alone what such a block computes
            with pytest.raises(ValueError, match="no tensor tells"):
                pipeline.convert(
                    paths[0], paths[1], to=b[0].removesuffix("-file"), **counts[0], **parts[1]
                )
            return False
        try:
            pipeline.convert(
                paths[0], paths[1], to=b[0].removesuffix("-file"), **counts[0], **parts[1]
            )
        except checkpoint.UnsupportedDtype:
            return False
        except ValueError as error:
            known = ("cannot hold", "needs", "does not hold", "together or not at all", "stacked")
            assert any(text in str(error) for text in known), error  # noqa: PT017
            return False
        pipeline.convert(paths[1], paths[2], to=a[0].removesuffix("-file"), **counts[1], **parts[0])
        before, after = bits(paths[0]), bits(paths[2])
        assert after.keys() == before.keys()
        for name, one in before.items():
            assert after[name] == one, name
    return True


def is_read(name: str) -> bool:
    """False for a layout that is read at prefixes of its own models, which these are not."""
    try:
        places.refuse_prefix(attention_blocks.named(name), "model.0.attn")
    except ValueError:
        return False
    return True


NAMED = {layout.name: layout for layout in registry.LAYOUTS if is_read(layout.name)}


def holds(a: str, b: str) -> bool:
    """True if the second layout can hold what the first has."""
    try:
        validation.refuse_export(NAMED[b], params_of(NAMED[a]), NAMED[a].semantics)
    except ValueError:
        return False
    return True


@cache
def holding(name: str) -> list[Case]:
    """Layouts and formats that can hold a layout, itself among them."""
    held = {b for b in NAMED if holds(name, b)}
    assert name in held
    return [case for case in CASES if case[0] in held]


PAIRS = st.sampled_from([case for case in CASES if case[0] in NAMED]).flatmap(
    lambda a: st.tuples(st.just(a), st.sampled_from(holding(a[0])))
)


@pytest.mark.parametrize("count", [4, pytest.param(500, marks=pytest.mark.slow)])
def test_back_and_forth(count: int) -> None:
    @seed(int(os.environ["JAXMHA_PROPERTY_SEED"]))
    @settings(
        max_examples=count,
        deadline=None,
        phases=[Phase.generate],  # a case is small as it is
        suppress_health_check=list(HealthCheck),
    )
    @given(PAIRS, st.sampled_from(DTYPES), st.integers(0, 2**32 - 1), st.booleans())
    def comes_back(pair: tuple[Case, Case], dtype: str, numbers: int, lead: bool) -> None:
        plain = any("-file" in layout for layout, _ in pair)  # Keras files have no stacked layers
        assume(back_and_forth(*pair, dtype, numbers, lead and not plain))

    comes_back()


# One case of every layout that files without a configuration can have at any prefix.
SINGLE = {name: suffix for name, suffix in CASES if suffix in (".safetensors", ".weights.h5")}


@pytest.mark.slow
@pytest.mark.parametrize("a", [name for name in SINGLE if is_read(name)])
def test_every_pair_of_layouts(a: str, held: list[tuple[Case, Case]]) -> None:
    """A pair comes back, or is refused: just as the parameters and the settings of both say."""
    one = a, SINGLE[a]
    for b in filter(is_read, SINGLE):
        other = b, SINGLE[b]
        expected = (one, other) in held and a not in meaning.ASKING
        assert back_and_forth(one, other, "float32", 0) == expected, (a, b)


@pytest.mark.everyday(dtype=["bfloat16"])
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_format_and_dtype(suffix: str, dtype: str) -> None:
    a = ("bert", ".safetensors")  # both targets hold all of it
    b = ("keras-file", suffix) if suffix == ".weights.h5" else ("haiku", suffix)
    assert back_and_forth(a, b, dtype, 0) == ((suffix, dtype) != (".npz", "bfloat16"))
