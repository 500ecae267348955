"""Every model type of transformers: what is converted is what the model computes."""

import json
from pathlib import Path

import pytest

from jaxmha.converters.discovery import families, unknown_attention
from jaxmha.converters.discovery.model_types import MODEL_TYPES
from tests.zoo import one, other_results, others, page, pool

# From the best class to the worst that may be; a type may become better. A block that did not run
# is no wrong conversion: the table shows it.
ALLOWED = (
    "right", "not run", "no attention", "masks said", "positions said", "parts said", "carried, said", "refused",
    "cannot be built",
)  # fmt: skip
EXPECTED: dict[str, str] = json.loads((Path(__file__).parent / "expected.json").read_text())


def some() -> list[str]:
    """A thirtieth of all types, one of each family of blocks, and one with positions of an image."""
    built = sorted(t for t, label in EXPECTED.items() if label != "cannot be built")
    chosen = {*built[1::30], "dinov3_vit", "dpt", "clip"}  # the last two are small
    for types in MODEL_TYPES.values():
        family = [t for t in built if t in types.split()]
        if chosen.isdisjoint(family):
            chosen.update(family[:1])
    return sorted(chosen)


def judge(model_type: str, label: str) -> None:
    assert label in ALLOWED, model_type
    assert ALLOWED.index(label) <= ALLOWED.index(EXPECTED[model_type]), model_type


def test_no_model_type_of_the_installed_transformers_is_unknown() -> None:
    tables = {row.model_type for row in families.checked()}
    unknown = sorted(set(pool.types()) - (tables & EXPECTED.keys()))
    assert not unknown, f"add to architectures, and run `python -m tests.zoo {' '.join(unknown)}`"


def test_the_page_is_made_of_the_table() -> None:
    rows = families.checked()
    assert {row.model_type: row.verdict for row in rows} == EXPECTED
    assert page.PAGE.read_text() == page.text(rows)


def test_a_reason_tells_the_form_and_every_place() -> None:
    shapes = {f"{x}.{i}.attn.sampling_offsets.weight": (4, 4) for x in "ab" for i in range(2)}
    shapes |= {name.replace("sampling_offsets", "value_proj"): (4, 4) for name in shapes}
    apart = unknown_attention.find(shapes, [])
    found = {"class": "carried, said", "carried": [*apart], "notes": unknown_attention.notes(apart)}
    told = page.reason("any", found)
    assert told.startswith("it is deformable")
    assert told.endswith("(a.{i}.attn, b.{i}.attn)")


@pytest.mark.slow_variants(
    "instructblip",
    "glm_ocr_text",
    "qwen3_vl_moe_text",
    "nemotron3_5_asr",
    "parakeet_encoder",
    "lfm3_vl_vision",
    "swiftformer",
    "mimi",
    "sam3_tracker_video",
    "oneformer",
    "vibevoice",
    "grounding-dino",
    "deimv2",
    "mobilevitv2",
    "pp_ocrv6_tiny_rec",
)
@pytest.mark.long
@pytest.mark.parametrize("model_type", some())
@pytest.mark.filterwarnings("default")
def test_some_of_every_family_are_as_the_whole_was(model_type: str) -> None:
    judge(model_type, one.check(model_type, whole=False)["class"])


@pytest.mark.slow
def test_models_of_other_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of every library that is installed: torch always is."""
    monkeypatch.setattr(pool, "RESULTS", tmp_path / "zoo.json")
    expected = other_results.expected()
    assert sorted(expected) == sorted(pool.titles())
    found = pool.results([t for t in pool.titles() if others.installed(t.partition("/")[0])], 2, {})
    print(pool.summary(found))
    for title, result in found.items():
        assert result["class"] in ALLOWED, title
        assert ALLOWED.index(result["class"]) <= ALLOWED.index(expected[title]), title


@pytest.mark.slow
def test_every_model_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "RESULTS", tmp_path / "zoo.json")
    found = pool.results(pool.types(), 2, {})
    print(pool.summary(found))
    assert sorted(found) == sorted(EXPECTED)
    for model_type, result in found.items():
        judge(model_type, result["class"])
