"""Masks of published models: what `masks_of` returns is what the models attend."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError

from jaxmha import checkpoint
from jaxmha.converters import masks_of
from jaxmha.converters.discovery import attended, attention_blocks, behaviours, layer_kinds
from jaxmha.converters.discovery.attended import Attended
from jaxmha.converters.migrate import pipeline
from tests.converters.configuration_classes import classes_of
from tests.zoo.masked import Given

pytestmark = pytest.mark.filterwarnings("default")
LAYERS = 3


def _saved(folder: Path, prefix: str = "model.layers.{}.self_attn", **config: Any) -> Path:
    rng = np.random.default_rng(0)
    names = [f"{prefix.format(i)}.{x}_proj.weight" for i in range(LAYERS) for x in "qkvo"]
    checkpoint.write(
        folder / "model.safetensors",
        {name: rng.normal(size=(8, 8)).astype(np.float32) for name in names},
    )
    sizes = {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(sizes | config))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama", "sliding_window": 4}, ["causal"] * 3),
        ({"model_type": "doge", "sliding_window": 4}, ["causal 3"] * 3),
        ({"model_type": "llama", "is_causal": False}, ["full"] * 3),
        ({"model_type": "mistral", "sliding_window": 4}, ["causal 3"] * 3),
        ({"model_type": "mistral", "sliding_window": None}, ["causal"] * 3),
        (
            {"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True,
             "max_window_layers": 2},
            ["causal", "causal", "causal 3"],
        ),
        ({"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": False}, ["causal"] * 3),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2},
            ["causal", "causal", "causal 4095"],
        ),
        (
            {"model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 2},
            ["causal 4095"] * 3,
        ),
        ({"model_type": "gemma2", "sliding_window": 4}, ["causal 3", "causal", "causal 3"]),
        (
            {"model_type": "gemma2", "sliding_window": 4, "sliding_window_pattern": 3},
            ["causal 3", "causal", "causal 3"],
        ),
        ({"model_type": "gemma2", "sliding_window": None}, ["unknown", "causal", "unknown"]),
        ({"model_type": "gpt_oss", "sliding_window": None}, ["unknown", "causal", "unknown"]),
        ({"model_type": "exaone4", "sliding_window": None}, ["causal"] * 3),
        *[
            (
                {"model_type": "cohere2", "sliding_window": 4, "sliding_window_pattern": pattern},
                ["causal 3", "causal 3", "causal" if pattern == 3 else "causal 3"],
            )
            for pattern in (3, "2", -1, [2], 0)
        ],
        ({"model_type": "qwen3_next", "sliding_window": 4, "use_sliding_window": True,
          "max_window_layers": 0}, ["causal"] * 3),
        ({"model_type": "qwen2", "sliding_window": 4, "layer_types": ["sliding_attention"] * 3},
         ["unknown"] * 3),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None},
         ["unknown"] * 3),
        ({"model_type": "glm_moe_dsa"}, ["unknown"] * 3),
        ({"model_type": "hrm_text"}, ["causal"] * 3),
        ({"model_type": "glm5_next_text", "layer_types": ["full_attention"] * 3}, ["unknown"] * 3),
        (
            {"model_type": "modernbert", "local_attention": 4,
             "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            ["full", "full 2 2", "full 2 2"],
        ),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 4,
             "layer_types": ["chunked_attention", "chunked_attention", "full_attention"]},
            ["causal chunks 4", "causal chunks 4", "causal"],
        ),
        ({"model_type": "mistral", "sliding_window": "4"}, ["unknown"] * 3),
        ({"model_type": "nobody"}, ["unknown"] * 3),
        ({}, ["unknown"] * 3),
    ],
)  # fmt: skip
def test_windows_and_causality_are_read(
    config: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    found = masks_of(_saved(tmp_path, **config))
    kinds = []
    for one_ in found.values():
        sides = [str(x) for x in (one_.left, one_.right) if x is not None]
        chunk = [] if one_.chunk is None else ["chunks", str(one_.chunk)]
        kinds.append(" ".join([one_.scheme, *sides, *chunk]))
    assert kinds == expected


# Name -> settings of windows.
SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"sliding_window": 5},
    "switch": {"use_sliding_window": True},
    "both": {"use_sliding_window": True, "sliding_window": 5},
    "off": {"use_sliding_window": False, "sliding_window": 5},
    "null": {"use_sliding_window": None, "sliding_window": 5},
    "last": {"sliding_window": 5, "max_window_layers": 2},
    "both, last": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "no window": {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2},
    "list": {"use_sliding_window": True, "sliding_window": 5, "layer_types":
             ["full_attention", "sliding_attention", "sliding_attention"]},
}  # fmt: skip
_SWITCHED = {*layer_kinds.SWITCHED, *layer_kinds.AFTER, "mistral", "phi3", "smollm3", "starcoder2"}


@pytest.mark.parametrize("model_type", sorted(_SWITCHED))
def test_windows_are_those_of_the_class(model_type: str) -> None:
    """The class decides without a switch, and where a model type does not have the switch."""
    (kind,) = classes_of([model_type]).values()
    for name, given in SWITCHES.items():
        settings = {"num_hidden_layers": LAYERS, **given}
        try:
            config = kind(**settings)
        except StrictDataclassFieldValidationError:  # null
            continue
        size = config.sliding_window
        kinds = getattr(config, "layer_types", None)
        if kinds is None or layer_kinds.ignores_list(model_type):
            kinds = ["sliding_attention" if size else "full_attention"] * LAYERS
        own, _ = behaviours.part(settings | {"model_type": model_type}, ())
        for i, expected in enumerate(kinds):
            if expected == "sliding_attention" and not size:
                continue  # the model raises
            found = attended._windowed(own, model_type, i, True)
            left = size - 1 if expected == "sliding_attention" else None
            assert found == Attended("causal", left), (name, i)


def test_layers_that_slide_without_a_window_are_those_of_the_class() -> None:
    """Models cannot run then, and `masks_of` does not say that their layers attend all tokens."""
    checked = 0
    for model_type, every in layer_kinds.EVERY.items():
        (kind,) = classes_of([model_type]).values()
        settings = {"num_hidden_layers": 7, "sliding_window": None}
        try:
            config = kind(**settings)
        except (ArithmeticError, TypeError, StrictDataclassError):  # exaone4, modernbert, cwm
            continue
        own, _ = behaviours.part(settings | {"model_type": model_type}, ())
        assert not every.optional
        assert [attended._kind(own, model_type, i) for i in range(7)] == config.layer_types
        checked += 1
    assert checked > 10


_GEMMA4 = {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 11}
# Model type -> settings of its class.
CAUSAL: dict[str, dict[str, Any]] = {
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": {"global_head_dim": 8},
    "mimo_v2_flash": {"v_head_dim": 8, "mlp_layer_types": ["dense"] * LAYERS},
}


@pytest.mark.parametrize("all_ways", [None, "all"])
@pytest.mark.parametrize("model_type", CAUSAL)
def test_masks_are_those_that_the_model_gives_its_layers(
    model_type: str, all_ways: str | None, tmp_path: Path
) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    given: dict[str, Any] = {"sliding_window": 4, "layer_types": kinds, "head_dim": 8}
    if model_type != "mimo_v2_flash":
        given["use_bidirectional_attention"] = all_ways
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 8, "pad_token_id": 0,
             "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    config = transformers.CONFIG_MAPPING[model_type](**sizes, **given, **CAUSAL[model_type])
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    seen: list[Any] = []
    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, named: seen.append(named["attention_mask"]), with_kwargs=True
        )
    T = 7
    with contextlib.suppress(RuntimeError), torch.no_grad():  # of the first layer: sizes of heads
        model(input_ids=torch.arange(1, T + 1)[None])
    ours = [*masks_of(_saved(tmp_path, model_type=model_type, **given)).values()]
    assert seen
    for theirs, mask in zip(seen, ours, strict=False):
        expected = np.ones((1, 1, T, T), bool) if theirs is None else theirs.numpy() == 0
        np.testing.assert_array_equal(mask.mask(T, T).to_array(T, T, np), expected)


# Model type -> its class, and the key of its window.
HYBRIDS = {
    "zaya": ("ZayaConfig", "sliding_window"),
    "inkling_text": ("InklingTextConfig", "sliding_window_size"),
    "inkling2_text": ("Inkling2TextConfig", "sliding_window_size"),
}


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_windows_of_hybrid_layers_are_those_of_transformers(
    model_type: str, tmp_path: Path
) -> None:
    from transformers.masking_utils import create_sliding_window_causal_mask

    name, key = HYBRIDS[model_type]
    kinds = ["hybrid", "hybrid_sliding", "hybrid_sliding"]
    settings: dict[str, Any] = {key: 5, "layer_types": kinds}
    config = getattr(transformers, name)(num_hidden_layers=LAYERS, **settings)
    config._attn_implementation = "eager"
    T = 7
    seen = create_sliding_window_causal_mask(config, torch.zeros(1, T, 8), None, None)
    whole, *windows = masks_of(_saved(tmp_path, model_type=model_type, **settings)).values()
    assert whole == Attended("causal")
    for window in windows:
        np.testing.assert_array_equal(window.mask(T, T).to_array(T, T, np), seen.numpy() == 0)


@pytest.mark.parametrize(
    ("model_type", "kind", "why"),
    [
        ("unlimited_ocr_text", "reference_sliding_attention", "attend the prompt and a window"),
        ("zaya", "hybrid_sliding", "sliding_window must be a positive integer"),
        ("qwen3", "linear_attention", "have no softmax"),
        ("qwen3", "of_tomorrow", "no mask is read for layers of of_tomorrow"),
    ],
)
def test_unknown_masks_of_other_kinds_have_notes(
    model_type: str, kind: str, why: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"model_type": model_type, "layer_types": [kind] * 3}
    if model_type != "zaya":
        settings["sliding_window"] = 5
    file = checkpoint.open(_saved(tmp_path, **settings) / "model.safetensors")
    with file:
        found = attended.of_prefixes(file, *_blocks(file))
    assert {one.scheme for one in found.values()} == {"unknown"}
    assert why in " ".join(attended.notes(found))


def _blocks(file: Any) -> tuple[list[attention_blocks.Block], list[str]]:
    blocks = attention_blocks.find(attention_blocks.shapes(file))
    return blocks, [block.prefix for block in blocks]


def test_older_words_for_full_attention(tmp_path: Path) -> None:
    kinds = ["attention", "full_attention", "attention"]
    found = masks_of(_saved(tmp_path, model_type="olmo_hybrid", layer_types=kinds))
    assert {str(one) for one in found.values()} == {"causal"}


def test_a_note_says_which_layers_have_a_window(tmp_path: Path) -> None:
    folder = _saved(tmp_path, model_type="gemma2", sliding_window=4, query_pre_attn_scalar=4,
                    attn_logit_softcapping=None)  # fmt: skip
    notes = pipeline.inspect(folder / "model.safetensors").notes
    assert any("a query and 3 keys before" in note and "masks_of" in note for note in notes)


def test_masks_are_those_of_their_definitions() -> None:
    ids = np.arange(7)
    apart = ids[2:, None] - ids  # 5 queries at the end of 7 keys
    window = Attended("causal", left=2).mask(5, 7).to_array(5, 7, np)
    assert np.array_equal(window[0, 0], (apart >= 0) & (apart <= 2))
    both = Attended("full", 1, 2).mask(5, 7).to_array(5, 7, np)  # no query attends the first keys
    assert np.array_equal(both[0, 0], (apart <= 1) & (apart >= -2))
    chunks = Attended("causal", chunk=3).mask(5, 7).to_array(5, 7, np)
    assert np.array_equal(chunks[0, 0], (apart >= 0) & (ids[2:, None] // 3 == ids // 3))
    with pytest.raises(ValueError, match="give it as mask="):
        Attended("unknown", why="a reason").mask(5, 7)
    with pytest.raises(ValueError, match="of_windows"):
        Attended("windows").mask(4, 4)


def test_windows_of_a_rolled_image_do_not_join_its_sides() -> None:
    mask = np.asarray(Attended("windows", shift=1).of_windows(2, 3, 2).array)
    assert mask.shape == (6, 1, 4, 4)
    assert mask[
        0
    ].all()  # the windows of the last row and the last column have pixels of both sides
    assert mask[5].sum() == 4
    assert np.asarray(Attended("windows").of_windows(2, 3, 2).array).all()
    assert np.asarray(Attended("windows", shift=1).of_windows(1, 3, 2).array).all()
    assert not np.asarray(Attended("windows", shift=1).of_windows(1, 1, 2, True).array).all()


def test_the_runner_sees_a_mask_that_is_read_wrongly() -> None:
    seen = np.broadcast_to(np.tri(7, dtype=bool), (2, 3, 7, 7))
    padding = np.ones((2, 7), bool)
    padding[1, 5:] = False
    padded = seen & padding[:, None, None]
    assert Given(Attended("causal"), [padding]).against(padded)[1] == ""
    for wrong in (Attended("full"), Attended("causal", left=3), Attended("causal", chunk=4)):
        assert "the model has" in Given(wrong, [padding]).against(padded)[1]
    assert "the model has" in Given(Attended("causal")).against(padded)[1]
    assert Given(Attended("unknown", why="why")).against(padded)[1].startswith("not read: why")
