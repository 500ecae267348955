"""The table of model types is what its script makes of this version of transformers."""

import pytest

from jaxmha.converters.discovery.model_types import MODEL_TYPES
from tests import model_types


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["vit", "bert", "gpt2", "qwen2_vl", "jamba", "maskformer"])
def test_the_table_is_not_stale(model_type: str) -> None:
    kept = {family for family, types in MODEL_TYPES.items() if model_type in types.split()}
    assert model_types.found(model_type) == kept
