"""Rotary frequencies by config.json are those of the model's rotary embedding in transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint, rope_frequencies
from jaxmha.converters import positions_of
from jaxmha.converters.discovery import architectures, behaviours, rotary_defaults, rotary_settings
from tests.converters.configuration_classes import classes_of
from tests.converters.rotary_classes import SETTINGS, computed, packages, rotary_of

pytestmark = pytest.mark.filterwarnings("default")
# Model types whose positions are not read from these settings -> why.
_ELSEWHERE = {
    "deepseek_v4": "attends compressed keys",
    "efficientloftr": "rotates by rows and columns",
    "mistral4": "latent attention: test_latent.py",
}
# Model type -> settings that no published file has, and which are read otherwise than by the class.
_APART = {
    "step3p5": "kinds",
    "qwen3_omni_moe_text": "proportional",  # the width of heads is odd by default
}


def _ours(model_type: str, raw: dict[str, Any], layer: int, width: int, most: int) -> Any:
    own, _ = behaviours.part({"max_position_embeddings": most, "model_type": model_type} | raw, ())
    rope = rotary_settings.of(own, model_type, layer)
    return rotary_settings.frequencies(own, rope, model_type, width)


def _compare(kind: Any, rotary: Any, names: Any = SETTINGS) -> int:
    """Compares a class with settings of all names; returns how many it and jaxmha compute."""
    checked, model_type = 0, kind.model_type
    for name in names:
        for layer in (0, 3):
            theirs = computed(kind, rotary, SETTINGS[name] | {"model_type": model_type}, layer)
            if theirs is None or name == _APART.get(model_type):
                continue
            width, most, values, factor = theirs
            try:
                found = _ours(model_type, SETTINGS[name], layer, width, most)
            except (KeyError, ValueError):
                continue  # refused
            where = f"{model_type}: {name}, layer {layer}"
            assert len(found.values) == len(values), where
            np.testing.assert_allclose(found.values, values, rtol=2e-6, err_msg=where)
            assert found.factor == pytest.approx(factor), where
            checked += 1
    return checked


# Package -> settings that its class reads in a way of its own, or that all classes read so.
SOME = {
    "llama": ("both", "both, with bases", "both, one empty", "share", "yarn, two lengths", "dims",
              "llama3, two lengths", "proportional", "base of NeoX"),
    "gpt_neox": ("base", "share", "share of NeoX", "base of NeoX", "both"),
    "glm": ("share", "no share", "shares of both", "share and scaling"),
    "phi3": ("su", "longrope, length of the class"),
    "olmo3": ("base", "older", "newer", "kinds and scaling"),
    "cohere2_moe": ("older", "both"),
    "bamba": ("share", "no share"),
}  # fmt: skip


@pytest.mark.parametrize("package", SOME)
def test_frequencies_are_those_of_the_class(package: str) -> None:
    ((kind, rotary),) = rotary_of(package)
    assert _compare(kind, rotary, SOME[package]) == 2 * len(SOME[package])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_frequencies_are_those_of_every_class(part: int) -> None:
    pairs = [pair for package in packages()[part::8] for pair in rotary_of(package)]
    known = [x for x in pairs if x[0].model_type in architectures.KNOWN - _ELSEWHERE.keys()]
    assert sum(_compare(*x) for x in known) > 30 * len(known)


@pytest.mark.slow
def test_defaults_of_rotation_are_those_of_the_classes() -> None:
    names = {x for types in rotary_defaults.BASES.values() for x in types.split()}
    names |= {x for types in rotary_defaults.SHARES.values() for x in types.split()}
    for name, kind in classes_of(names | {*rotary_defaults.FILLED}).items():
        if name in rotary_defaults.OF_KINDS:
            continue
        for given in ({}, {"rope_scaling": {"mrope_section": [24, 20, 20]}}):
            if not given and name in rotary_defaults.NEEDED:
                continue
            ours, theirs = rotary_settings.of(given, name, 0), kind(**given).rope_parameters
            assert ours["rope_theta"] == theirs["rope_theta"], name
            share = ours.get("partial_rotary_factor", 1.0)
            assert share == theirs.get("partial_rotary_factor", 1.0), name


def _saved(folder: Path, **config: Any) -> Path:
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkvo"]
    checkpoint.write(folder / "a.safetensors", {name: np.ones((16, 16)) for name in names})
    sizes = {
        "num_attention_heads": 2,
        "hidden_size": 16,
        "head_dim": 8,
        "max_position_embeddings": 32,
    }
    (folder / "config.json").write_text(json.dumps(sizes | config))
    return folder


def test_older_parameters_hold_where_a_file_has_both(tmp_path: Path) -> None:
    settings = SETTINGS["both"] | {"rope_theta": 3e4}
    (found,) = positions_of(_saved(tmp_path, model_type="llama", **settings)).values()
    assert str(found) == "rotary, base 30000, 8 features in pairs of halves, scaling linear"
    assert rope_frequencies(settings, 8).values == found.rotary.inv_freq  # type: ignore[union-attr]
    two = SETTINGS["yarn, two lengths"]
    assert rope_frequencies(two, 8) == rope_frequencies(
        {**two, "rope_scaling": two["rope_scaling"] | {"original_max_position_embeddings": 32}}, 8
    )


@pytest.mark.parametrize(
    ("model_type", "name", "why"),
    [
        ("llama", "share and scaling", "partial_rotary_factor is 0.5, and its heads are rotated"),
        ("llama", "kinds", "rope_parameters are those of kinds of layers"),
        ("mellum", "newer", "rope_parameters of the configuration are not those of kinds"),
        ("laguna", "base", "rope_parameters of the configuration are missing"),
    ],
)
def test_parameters_that_the_class_cannot_have_are_named(
    model_type: str, name: str, why: str, tmp_path: Path
) -> None:
    (found,) = positions_of(_saved(tmp_path, model_type=model_type, **SETTINGS[name])).values()
    assert found.scheme == "unknown"
    assert why in found.why


def test_parameters_of_a_missing_kind_are_named() -> None:
    own = {"layer_types": ["chunked_attention"], **SETTINGS["kinds"]}
    with pytest.raises(ValueError, match="rope_parameters of chunked_attention are missing"):
        rotary_settings.of(own, "mellum", 0)


def test_conformers_have_a_key_of_their_own() -> None:
    for name in ("seamless_m4t", "wav2vec2-bert", "wav2vec2-conformer"):
        assert rotary_settings.of({"rotary_embedding_base": 7.0}, name, 0)["rope_theta"] == 7.0
