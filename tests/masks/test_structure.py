"""Fields of a Mask on their way out: empty axes, dtypes, sizes."""

import numpy as np
import pytest

from jaxmha import Mask
from jaxmha.converters.masks.structure import array_of, padding_of


def test_no_keys() -> None:
    mask = Mask.padding(key_value=np.ones((2, 0), bool))
    padding, array = padding_of(mask, "key_value", 0), array_of(mask, 3, 0)
    assert padding is not None
    assert padding.shape == (2, 0)
    assert array is not None
    assert array.shape[-1] == 0


def test_dtypes_are_checked() -> None:
    mask = Mask(key_value_padding=np.array([[2, 0, 1]]))
    with pytest.raises(TypeError, match="key_value_padding must be Boolean"):
        padding_of(mask, "key_value", 3)
    with pytest.raises(TypeError, match="key_value_padding must be Boolean"):
        array_of(mask, 5, 3)
    with pytest.raises(TypeError, match="query_lengths must be integers"):
        padding_of(Mask(query_lengths=np.array([1.0])), "query", 3)


def test_a_wrong_length_names_the_field() -> None:
    mask = Mask.padding(key_value=np.ones((2, 5), bool))
    with pytest.raises(ValueError, match="key_value_padding must end in an axis of 3"):
        padding_of(mask, "key_value", 3)
