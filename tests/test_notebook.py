"""HTML of values for notebooks: what they hold, escaped, and of bounded size."""

import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, notebook
from jaxmha.converters.matching.plan import Line, MatchPlan, Question
from jaxmha.converters.migrate import Plan, Step
from tests import pace
from tests.html_tags import parsed

HOSTILE = '"><script>alert(1)</script>\u202e\n'


def shown(value: Any) -> str:
    html = value._repr_html_()
    assert isinstance(html, str)
    tags = parsed(html)
    assert not tags.names & {"script", "img", "a"}
    assert "\u202e" not in html
    return html


def drawn(html: str) -> list[np.ndarray]:
    """The arrays of the pictures: the cells of every run."""
    found = []
    for svg in re.findall(r"<svg.*?</svg>", html):
        frame, runs = re.findall(r'<path d="(.*?)"', svg)
        S, T = map(int, re.findall(r"M0 0h(\d+)v(\d+)", frame)[0])
        allowed = np.zeros((T, S), bool)
        for j, i, size in re.findall(r"M(\d+) (\d+)h(\d+)v1", runs):
            assert not allowed[int(i), int(j) : int(j) + int(size)].any()
            allowed[int(i), int(j) : int(j) + int(size)] = True
        found.append(allowed)
    return found


@pytest.mark.parametrize(
    ("mask", "T", "S"),
    [
        (Mask.causal() & Mask.window(2, None), 8, 8),
        (Mask.dense(np.arange(15).reshape(3, 5) % 4 > 0), 3, 5),
        (Mask.dense(np.zeros((3, 5), bool)), 3, 5),
    ],
    ids=["causal", "dense", "nothing"],
)
def test_pictures_of_masks(mask: Mask, T: int, S: int) -> None:
    (found,) = drawn(shown(mask))
    assert np.array_equal(found, np.asarray(mask.to_array(T, S))[0, 0])


def test_panels_of_rows_and_heads() -> None:
    html = shown(Mask.lengths(key_value=np.arange(1, 8)))
    assert len(drawn(html)) == 4
    assert "... 3 more of (B, N) = (7, 1)" in html
    assert "B 3" in html


def test_huge_masks_are_small_pictures() -> None:
    start = time.process_time()
    long = Mask.causal() & Mask.lengths(key_value=np.full(1000, 10**7))
    html = shown(long)
    worst = shown(Mask.dense(np.indices((4, 999, 999)).sum(0) % 2 > 0))
    assert pace.within(time.process_time() - start, 5)
    assert "the first 32 positions of T=8, S=10000000" in html
    assert max(map(len, (html, worst))) < 60_000


def test_a_traced_mask_has_no_picture() -> None:
    seen = []

    def f(lengths: jax.Array) -> jax.Array:
        seen.append(shown(Mask.lengths(key_value=lengths)))
        return lengths

    jax.jit(f)(jnp.arange(3))
    assert drawn(seen[0]) == []
    assert "key_value_lengths=int32[3]" in seen[0]


def test_parameters() -> None:
    params = jaxmha.init_params(jax.random.key(0), num_heads=2, features=6)
    html = shown(params)
    assert "MHAParams: 168 parameters" in html
    assert "query.kernel" in html
    assert "(6, 2, 3)" in html
    shapes = jax.eval_shape(lambda: params)
    assert shown(shapes) == html


def test_explanations() -> None:
    x = jnp.ones((1, 5, 2, 3))
    found = jaxmha.explain(x, x, x, implementation=["blocked", "reference"], platform="cpu")
    html = shown(found)
    assert "chosen: blocked" in html
    assert "on cpu" in html


def test_plans_of_hostile_names() -> None:
    step = Step("attention", "torch", HOSTILE, HOSTILE, ("a",), num_heads=2)
    html = shown(Plan("flax", (step,) * 1000, source=HOSTILE))
    assert "1000 layers of" in html
    assert "... 950 more" in html
    line = Line(HOSTILE, (HOSTILE,) * 99)
    question = Question(HOSTILE, ("b",), HOSTILE, ((line,),))
    html = shown(MatchPlan((line,), (question,)))
    assert "1 arrays filled, 1 questions, 0 unused" in html
    assert len(html) < 5000


def test_text_is_cut() -> None:
    assert len(notebook.text("x" * 10**7)) == 120
