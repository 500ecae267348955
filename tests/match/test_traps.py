"""Drawn pairs are matched rightly, and traps are never accepted."""

import numpy as np
import pytest

from jaxmha.converters.matching import loading
from tests.match import traps

COUNT = 200
KINDS = list(traps.TRAPS)


@pytest.mark.parametrize("part", range(4))
def test_traps_are_refused_or_asked(part: int) -> None:
    accepted = []
    for seed in range(part, COUNT, 4):
        rng, kind = np.random.default_rng(seed), KINDS[seed % len(KINDS)]
        drawn = traps.draw(rng)
        traps.TRAPS[kind](drawn, rng)
        try:
            dict(loading.filled(drawn.target, drawn.source, None))
        except ValueError:
            continue
        accepted.append((seed, kind))
    assert accepted == []


@pytest.mark.parametrize("part", range(2))
def test_the_same_models_without_traps_are_matched(part: int) -> None:
    for seed in range(part, 40, 2):
        drawn = traps.draw(np.random.default_rng(seed))
        made = dict(loading.filled(drawn.target, drawn.source, None))
        assert made.keys() == drawn.right.keys()
        for name, value in drawn.right.items():
            np.testing.assert_array_equal(made[name], value, err_msg=f"{seed} {name}")
