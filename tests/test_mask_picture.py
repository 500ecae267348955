"""A mask prints as a picture of the pairs that it allows."""

import jax
import numpy as np
import pytest

from jaxmha import Mask, mask_repr
from tests import tolerance
from tests.test_mask import MADE, S, T, loops


def test_prints_as_a_picture() -> None:
    mask = Mask.causal() & Mask.lengths(key_value=np.asarray([2, 3], np.int32))
    assert repr(mask) == "Mask(causal_offset=0, key_value_lengths=int32[2])"
    assert mask_repr.picture(mask, 3, 4).splitlines() == [
        "Mask(causal_offset=0, key_value_lengths=int32[2])",
        "B 0:",
        "■ · · ·",
        "■ ■ · ·",
        "■ ■ · ·",
        "B 1:",
        "■ · · ·",
        "■ ■ · ·",
        "■ ■ ■ ·",
    ]


@pytest.mark.parametrize("name", MADE)
def test_picture_shows_what_the_mask_says(name: str) -> None:
    mask, conditions = MADE[name]
    panels = [
        [[cell == mask_repr.ATTENDS for cell in line.split()] for line in lines]
        for panel in "\n".join(mask_repr.picture(mask, T, S).splitlines()[1:]).split(":\n")
        if (lines := [x for x in panel.splitlines() if x and x[0] in "■·"])
    ]
    small = mask.to_array(T, S, np).shape[:2]
    want = loops(conditions)[: small[0], : small[1]].reshape(-1, T, S)[: mask_repr.PANELS]
    tolerance.assert_same(np.asarray(panels), want)
    assert str(mask).startswith(repr(mask))


def test_picture_of_a_long_mask_is_small() -> None:
    T = 10**6  # T * T would not fit
    lines = mask_repr.picture(Mask.causal() & Mask.dense(np.ones((1, T), bool)), T, T).splitlines()
    assert len(lines) == 1 + mask_repr.LARGEST + 1
    assert lines[-1] == f"... {T - mask_repr.LARGEST} more rows"
    assert lines[1].endswith(f"... {T - mask_repr.LARGEST} more columns")


def test_traced_masks_print_without_values() -> None:
    shown = []
    jax.jit(lambda mask: shown.append(str(mask)))(Mask.padding(key_value=np.ones((2, 5), bool)))
    assert shown == ["Mask(key_value_padding=bool[2, 5])"]
