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


@pytest.mark.everyday(part=[0])
@pytest.mark.parametrize("part", range(10))
def test_names_that_tell_nothing_are_asked_or_matched_rightly(part: int) -> None:
    outcomes = {"right": 0, "asked": 0}
    for seed in range(part, 1900, 10):
        rng = np.random.default_rng(seed)
        drawn = traps.draw(rng)
        traps.without_names(drawn, rng)
        try:
            made = dict(loading.filled(drawn.target, drawn.source, None))
        except ValueError:
            outcomes["asked"] += 1
            continue
        for name, value in drawn.right.items():
            np.testing.assert_array_equal(made[name], value, err_msg=f"{seed} {name}")
        outcomes["right"] += 1
    assert min(outcomes.values()) > 0
