"""Positions of published models: what `positions_of` returns is what the models compute."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxmha import checkpoint, dot_product_attention
from jaxmha.converters import positions_of
from jaxmha.converters.discovery import added_terms, axial, query_scale, relative, towers
from jaxmha.converters.discovery.positions import Rotary
from jaxmha.converters.discovery.query_scale import QueryScale
from jaxmha.converters.migrate import pipeline
from tests.drawn import to_jax

pytestmark = pytest.mark.filterwarnings("default")
BLOCK = "layers.0.self_attn"


def test_a_folder_is_read_as_its_checkpoint_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [f"{BLOCK}.{x}_proj.weight" for x in "qkvo"]
    state = {name: rng.normal(size=(8, 8)).astype(np.float32) for name in names}
    file = tmp_path / "model.safetensors"
    checkpoint.write(file, state)
    config = {"model_type": "llama", "num_attention_heads": 2, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = positions_of(tmp_path)
    assert found == positions_of(file)
    assert found[BLOCK].scheme == "rotary"
    checkpoint.write(tmp_path / "other.safetensors", state)
    assert positions_of(tmp_path) == found
    file.rename(tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match="several checkpoints"):
        positions_of(tmp_path)


PROJECTED = {f"{BLOCK}.{x}_proj.weight": (8, 8) for x in "qkvo"}
PACKED = {
    "h.0.self_attention.query_key_value.weight": (24, 8),
    "h.0.self_attention.dense.weight": (8, 8),
}
FALCON = {"model_type": "falcon", "multi_query": False, "new_decoder_architecture": False}


@pytest.mark.parametrize(
    ("config", "shapes", "scheme"),
    [
        ({"model_type": "granitemoehybrid"}, PROJECTED, "none, position_embedding_type is not"),
        (
            {"model_type": "granitemoehybrid", "position_embedding_type": "rope"},
            PROJECTED,
            "rotary, base 10000",
        ),
        ({"model_type": "zamba2", "use_mem_rope": False}, PROJECTED, "none, use_mem_rope is false"),
        ({"model_type": "zamba2", "use_mem_rope": True}, PROJECTED, "rotary, base 10000"),
        (FALCON | {"alibi": True}, PACKED, "alibi (Alibi, added to the logits)"),
        (FALCON | {"alibi": False}, PACKED, "rotary, base 10000"),
    ],
)
def test_a_setting_turns_the_scheme_off(
    config: dict[str, Any], shapes: dict[str, Any], scheme: str, tmp_path: Path
) -> None:
    state = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    checkpoint.write(tmp_path / "model.safetensors", state)
    sizes = {"num_attention_heads": 2, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(sizes | config))
    (found,) = positions_of(tmp_path).values()
    assert str(found).startswith(scheme)


def test_terms_ask_for_what_they_need() -> None:
    grid = added_terms.Grid(np.zeros((5, 4)), np.zeros((3, 4)))
    assert grid.bias(6, 6, np.zeros((1, 6, 2, 4))).shape == (1, 2, 6, 6)
    with pytest.raises(ValueError, match="query is needed"):
        grid.bias(6, 6)
    with pytest.raises(ValueError, match="a window of side 2"):
        added_terms.Window(np.zeros((9, 2))).bias(5, 5)
    waves = added_terms.Waves(np.zeros((2, 4)), np.zeros((2, 4)), np.zeros((8, 2, 4)))
    with pytest.raises(ValueError, match="query and key are needed"):
        waves.bias(3, 3)


def test_terms_have_the_dtype_of_the_queries() -> None:
    """A bias of float64 is refused next to queries of float32."""
    heads = np.ones((1, 4, 2, 6), np.float32)
    table = np.zeros((2, 6), np.float32)
    for term in (
        added_terms.alibi(2, "bloom", {}),
        added_terms.Computed(np.ones((3, 2)), np.ones(3), np.ones((2, 3)), np.ones(2)),
        added_terms.Waves(table, table, np.zeros((6, 2, 6), np.float32)),
    ):
        wide = heads.astype(np.float64)
        found = [term.bias(4, 4, q, q).dtype for q in (heads, to_jax(heads), wide)]
        assert found == [np.float32, np.float32, np.float64], term
    bias = added_terms.alibi(2, "bloom", {}).bias(4, 4)
    assert dot_product_attention(heads, heads, heads, bias=bias).dtype == np.float32


def test_a_term_by_pair_is_looked_up() -> None:
    table, index = np.arange(10.0).reshape(5, 2), np.asarray([[0, 4, 1], [3, 2, 2]])
    term = added_terms.Looked(table, index)
    np.testing.assert_array_equal(term.bias(2, 3)[1], table[index, 1])
    with pytest.raises(ValueError, match=r"must be \(2, 3\)"):
        term.bias(3, 3)


@pytest.mark.parametrize("first", [False, True])
def test_a_class_token_has_rows_of_its_own(first: bool) -> None:
    """The table of a window, without its index, by the formula of BEiT; both ways to store it."""
    side, N = 3, 2
    table = np.random.default_rng(0).normal(size=((2 * side - 1) ** 2 + 3 * first, N))
    term = relative.square(table)
    assert term is not None
    T = side * side + first
    found = term.bias(T, T)
    if first:
        np.testing.assert_array_equal(found[:, 0, 1:], np.repeat(table[-3][:, None], T - 1, 1))
        np.testing.assert_array_equal(found[:, 1:, 0], np.repeat(table[-2][:, None], T - 1, 1))
        np.testing.assert_array_equal(found[:, 0, 0], table[-1])
    inner = found[:, first:, first:]
    for t, s in ((0, 8), (5, 1), (4, 4)):
        row, column = t // side - s // side + side - 1, t % side - s % side + side - 1
        np.testing.assert_array_equal(inner[:, t, s], table[row * (2 * side - 1) + column])
    if not first:  # MaxViT: by head, key minus query
        by_head = np.flip(table.T.reshape(N, 5, 5), (1, 2))
        same = relative.square(by_head)
        assert same is not None
        np.testing.assert_array_equal(same.bias(T, T), found)


def test_rows_and_columns_need_no_configuration(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {"a.qkv.weight": rng.normal(size=(24, 8)), "a.proj.weight": rng.normal(size=(8, 8))}
    state |= {f"a.rel_pos_{x}": rng.normal(size=(5, 4)) for x in "hw"}
    checkpoint.write(tmp_path / "a.safetensors", state)
    (found,) = positions_of(tmp_path / "a.safetensors").values()
    assert isinstance(found.added, added_terms.Grid)
    np.testing.assert_array_equal(found.added.rows, state["a.rel_pos_h"])


def test_queries_grow_with_their_positions() -> None:
    query = np.ones((1, 9, 1, 2))
    found = QueryScale(0.5, 4.0, 1)(query, np.arange(9))[0, :, 0, 0]
    steps = np.asarray([0, 0, 0, 1, 1, 1, 1, 2, 2])
    np.testing.assert_allclose(found, 1 + 0.5 * np.log(1 + steps), rtol=1e-15)
    settings: dict[str, Any] = {"attn_temperature_tuning": True, "no_rope_layers": [1, 0]}
    settings |= {"attn_scale": 0.5, "floor_scale": 4}
    assert [query_scale.of(settings, layer) for layer in (0, 1)] == [None, QueryScale(0.5, 4.0, 1)]
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    given = {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}
    for beam, rotated in ((kinds, (True, False)), (kinds | given, (False, True))):
        read = [query_scale.of({"model_type": "beam", **beam}, layer) for layer in (0, 1)]
        assert [one is None for one in read] == list(rotated)
    for change, layer, message in (
        ({"attn_scale": None}, 1, "attn_scale is missing"),
        ({"floor_scale": 0}, 1, "floor_scale must be above 0"),
        ({}, 2, "no_rope_layers has 2 layers, and no layer 2"),
    ):
        with pytest.raises(ValueError, match=message):
            query_scale.of({**settings, **change}, layer)


def test_the_scheme_is_named_by_every_command(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [f"{BLOCK}.{x}_proj.weight" for x in "qkvo"]
    checkpoint.write(tmp_path / "a.safetensors", {n: rng.normal(size=(8, 8)) for n in names})
    config = {"model_type": "llama", "num_attention_heads": 2, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scheme = "rotary, base 10000, 4 features in pairs of halves"
    info = pipeline.inspect(tmp_path / "a.safetensors")
    assert info.blocks[0].positions == scheme
    plan, _ = pipeline.plan(tmp_path / "a.safetensors", to="flax")
    done = pipeline.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="flax")
    for notes in (info.notes, plan.notes, done.notes):
        assert any("1 x layers.{i}.self_attn: " + scheme in note for note in notes)
    with checkpoint.open(tmp_path / "b.safetensors") as file:
        assert file.metadata["jaxmha.positions.layers/0/self_attn"] == scheme


def test_places_are_in_the_order_of_the_tokens() -> None:
    assert axial.grid(2, 4, 2)[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    classed = axial.of("dinov3_vit", {"num_register_tokens": 2}, 8, 100.0, 0)
    assert classed.places(2, 2).tolist() == [[0, 0]] * 3 + [
        [-0.5, -0.5], [-0.5, 0.5], [0.5, -0.5], [0.5, 0.5]
    ]  # fmt: skip
    last = axial.of("llama4_vision_model", {}, 8, 100.0, 0)
    assert last.places(1, 2).tolist() == [[1, 1], [1, 2], [0, 0]]


@pytest.mark.slow_variants("*", "!False-float64-True", "!True-float32-False", "!True-bfloat16-True")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("centred", [False, True])
def test_rows_and_columns_turn_pairs(interleaved: bool, dtype: str, centred: bool) -> None:
    """Pairs as complex numbers, with places that are traced; the last feature belongs to none."""
    axial_ = axial.Axial((1.0, 0.3, 2.0), (0, 1, 1), interleaved, centred=centred)
    rng = np.random.default_rng(0)
    places = axial_.places(2, 3)
    with jax.enable_x64(dtype == "float64"):
        x = to_jax(rng.normal(size=(2, 6, 3, 7)), dtype)
        found = jax.jit(lambda x, places: axial_(x, places))(x, places)
        assert found.dtype == x.dtype
        turned, exact = (np.asarray(one, np.float64) for one in (found, x))
    angle = (places[:, [0, 1, 1]] * np.asarray(axial_.inv_freq))[:, None]
    first, second = _ends(exact, interleaved)
    expected = (first + 1j * second) * np.exp(1j * angle)
    got = _ends(turned, interleaved)
    tolerance = {"float64": 1e-14, "float32": 1e-5, "bfloat16": 2**-7}[dtype]
    np.testing.assert_allclose(got[0] + 1j * got[1], expected, atol=3 * tolerance)
    np.testing.assert_array_equal(turned[..., 6:], exact[..., 6:])


@pytest.mark.usefixtures("no_shape_hook")
def test_places_must_be_as_many_as_tokens() -> None:
    x = np.ones((1, 6, 2, 4), np.float32)
    plain = axial.Axial((1.0, 1.0), (0, 1))
    for wrong in (axial.grid(1, 1), axial.grid(2, 4), np.arange(6)):
        with pytest.raises(ValueError, match=r"places of axes \(T, 2\)"):
            plain(x, wrong)
    with pytest.raises(ValueError, match="H of at least 4"):
        plain(x[..., :2], axial.grid(2, 3))
    with pytest.raises(TypeError, match="x"):
        plain(x.astype(np.int32), axial.grid(2, 3))


def _ends(x: np.ndarray, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    return (x[..., 0:6:2], x[..., 1:6:2]) if interleaved else (x[..., :3], x[..., 3:6])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_traced_heads_are_rotated_and_scaled(dtype: str) -> None:
    rotary = Rotary((1.0, 0.1), factor=1.25)
    x = to_jax(np.random.default_rng(0).normal(size=(1, 5, 2, 6)), dtype)
    found = jax.jit(lambda x: rotary(x, np.arange(5)))(x)
    assert found.dtype == x.dtype
    exact = np.asarray(x, np.float64)
    angle = np.arange(5)[:, None, None] * np.asarray([1.0, 0.1])
    turned = 1.25 * (exact[..., :2] + 1j * exact[..., 2:4]) * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag, exact[..., 4:]], -1)
    # One rounding of the result, and no other.
    rounded = np.asarray(to_jax(expected, dtype), np.float64)
    near = 1e-14 if dtype == "float64" else 1e-6
    np.testing.assert_allclose(np.asarray(found, np.float64), rounded, rtol=near, atol=near)


def test_every_tower_names_a_key_of_its_configuration() -> None:
    from transformers import CONFIG_MAPPING

    for model_type, rows in towers.TOWERS.items():
        content = CONFIG_MAPPING[model_type]().to_dict()
        assert len(list(towers.rows(content))) == len(rows), model_type
