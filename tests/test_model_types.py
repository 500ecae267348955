"""The table of model types is what its script makes of this version of transformers."""

import contextlib
import time

import pytest

from tests import model_types


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["vit", "bert", "gpt2", "qwen2_vl", "jamba", "maskformer"])
def test_the_table_is_not_stale(model_type: str) -> None:
    assert model_types.found(model_type) == model_types.kept(model_type)


def test_a_type_that_takes_too_long_keeps_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(model_type: str) -> set[str]:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.1)

    monkeypatch.setattr(model_types, "found", endless)
    monkeypatch.setattr(model_types, "_LIMIT", 1)
    assert model_types.table(["gpt2"]) == {"GPT-2": {"gpt2"}}
