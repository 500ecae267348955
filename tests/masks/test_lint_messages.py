"""Words of the linter, and of refused masks, that tell a newcomer what to pass."""

from typing import Any

import numpy as np
import pytest

from jaxmha import Mask, dot_product_attention
from jaxmha.converters import lint_masks
from jaxmha.converters.masks import jax
from jaxmha.flax import attention_fn

CAUSAL = np.tri(5, dtype=bool)
ADDITIVE = np.where(CAUSAL, 0.0, -np.inf).astype(np.float32)


@pytest.mark.parametrize(
    ("framework", "arguments", "text"),
    [
        ("pytorch", {}, r"got 'pytorch': did you mean torch\?$"),
        ("torch", {"mask": CAUSAL}, "arguments are attn_mask, is_causal, key_padding_mask; "),
        ("sdpa", {"mask": CAUSAL}, "arguments are attn_mask, is_causal; "),
        ("jaxmha", {"attn_mask": CAUSAL}, r"local_window_size, mask, query_seq_lengths; "),
    ],
)
def test_a_wrong_call_names_the_right_one(
    framework: str, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        lint_masks(framework, **arguments)


@pytest.mark.parametrize(
    ("framework", "name"), [("jaxmha", "mask"), ("keras", "attention_mask"), ("flax", "mask")]
)
def test_an_additive_mask_has_one_remedy(framework: str, name: str) -> None:
    arguments: dict[str, Any] = {name: ADDITIVE}
    (found,) = lint_masks(framework, **arguments)
    assert "ass `mask == 0`" in str(found) or "pass mask == 0, " in str(found)


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("mask", "taken"),
    [(CAUSAL.astype(int), True), (CAUSAL.astype(np.float32), True), (ADDITIVE, False)],
)
def test_numbers_are_refused_by_functions_and_read_by_modules(mask: Any, taken: bool) -> None:
    """The linter says of each call what it does."""
    (found,) = lint_masks("jaxmha", mask=mask)
    assert (found.name, found.argument) == ("refused", "mask")
    x = np.ones((5, 2, 3), np.float32)
    with pytest.raises(TypeError, match="mask must be Boolean"):
        dot_product_attention(x, x, x, mask=mask)
    if taken:
        assert "attention_fn, take it" in found.what
        assert lint_masks("jaxmha", mask=mask != 0) == []
        attention_fn(x, x, x, mask=mask)
        return
    assert "attention_fn, refuse it too" in found.what
    with pytest.raises(ValueError, match="additive"):
        attention_fn(x, x, x, mask=mask)


def test_numbers_of_0_and_1_have_the_other() -> None:
    with pytest.raises(TypeError, match="pass mask != 0 if it is 0/1"):
        jax.import_masks(mask=CAUSAL.astype(int))


def test_padding_of_torch_within_a_triangle() -> None:
    tokens = np.arange(5) < np.array([[3], [5]])[:, None, None]
    inverted, _ = lint_masks("jaxmha", mask=CAUSAL & ~tokens)
    assert "next to a causal triangle" in inverted.what
    assert inverted.fix == "Negate the padding before it joins the triangle (`~padding`)"
    for right in (tokens, tokens[..., ::-1]):
        assert "inverted" not in [found.name for found in lint_masks("jax", mask=CAUSAL & right)]


def test_structures_are_not_inverted() -> None:
    mask = Mask.causal() & Mask.lengths(key_value=np.array([0, 3]))
    assert [found.name for found in lint_masks("jaxmha", mask=mask, key_length=5)] == ["empty rows"]
    nothing = Mask.window(2, 0) & Mask.padding(key_value=np.arange(5) > np.array([[2], [3]]))
    found = lint_masks("jaxmha", mask=nothing, query_length=2)
    assert [one.name for one in found] == ["empty rows"]


@pytest.mark.parametrize(
    "mask",
    [
        np.tri(2, 6, 4, dtype=bool) & (np.arange(6) > 4),  # left padding of a cache
        np.outer(np.arange(5) > 2, np.arange(5) > 2),  # left padding of queries and keys
        np.triu(np.ones((5, 5), bool), 2),  # the future alone
    ],
)
def test_empty_queries_are_no_batch(mask: Any) -> None:
    assert "wrong axis" not in [found.name for found in lint_masks("jaxmha", mask=mask)]
