"""Masks of scaled_dot_product_attention against live torch: every combination and shape."""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

from jaxmha import Mask, Semantics, dot_product_attention
from jaxmha.converters.layout.arrays import NDArray, to_numpy, to_torch
from jaxmha.converters.masks.sdpa import export_masks, import_masks
from tests.drawn import to_jax
from tests.masks import ours
from tests.tolerance import assert_close

B, N, K, H = 2, 6, 3, 11
# 16 floors of float32 are 1e-6 of the scale.
FACTOR = 0.5
SHAPES = [axes for rank in (2, 3, 4) for axes in itertools.product((False, True), repeat=rank)]
KINDS = ("bool", "float", "inf")


def given(kind: str, full: tuple[bool, ...], T: int, S: int) -> NDArray:
    """A mask with the axes given in full, the others of size 1; some rows have nothing left."""
    sizes = (B, N, T, S)[-len(full) :]
    shape = tuple(size if present else 1 for size, present in zip(sizes, full, strict=True))
    rng = np.random.default_rng([len(kind), *shape])
    keep = rng.random(shape) < 0.6
    keep[..., 0, :] = keep.shape[-2] == 1
    added = rng.standard_normal(shape).astype(np.float32)
    both = np.where(keep, added, np.float32(-np.inf))
    return {"bool": keep, "float": added, "inf": both}[kind]


def heads(count: int, length: int, seed: int = 0, width: int = H) -> torch.Tensor:
    return torch.randn((B, count, length, width), generator=torch.Generator().manual_seed(seed))


def sdpa(inputs: Sequence[torch.Tensor], **arguments: Any) -> torch.Tensor:
    query, key, value = inputs
    return scaled_dot_product_attention(query, key, value, **arguments)


def turned(tensor: torch.Tensor) -> NDArray:
    """`(B, N, T, H)` as `(B, T, N, H)`."""
    return to_numpy(tensor.transpose(1, 2))


def arrays(made: list[Any], T: int, S: int) -> dict[str, NDArray]:
    """Masks of many calls as one, `(C, B, N, T, S)`."""
    masks = np.ones((len(made), B, N, T, S), bool)
    biases = np.zeros(masks.shape, np.float32)
    for c, (mask, bias) in enumerate(made):
        masks[c] = True if mask is None else mask.to_array(T, S, np)
        biases[c] = 0 if bias is None else bias
    return {"mask": masks, "bias": biases}


@pytest.mark.slow_variants("*", "!5-7-False-flash", "!7-5-True-math")
@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("gqa", [False, True])
@pytest.mark.parametrize(("T", "S"), [(5, 7), (7, 5)])
def test_every_combination(T: int, S: int, gqa: bool, kernel: Any) -> None:
    """attn_mask 3 kinds x 28 shapes, or none, x is_causal 2."""
    groups = K if gqa else N
    inputs = heads(N, T), heads(groups, S, 1), heads(groups, S, 2)
    masks = [None, *(given(k, full, T, S) for k in KINDS for full in SHAPES)]
    made, expected, what = [], [], []
    for attn_mask, is_causal in itertools.product(masks, (False, True)):
        tensor = None if attn_mask is None else to_torch(attn_mask)
        arguments: dict[str, Any] = {"attn_mask": tensor, "is_causal": is_causal}
        context = sdpa_kernel(SDPBackend.MATH) if kernel == "math" else nullcontext()
        with context:
            refuses = kernel == "math" or (attn_mask is not None and attn_mask.ndim == 3)
            if refuses and attn_mask is not None and is_causal:
                with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set"):
                    sdpa(inputs, enable_gqa=gqa, **arguments)
                with pytest.raises(ValueError, match="refuses attn_mask with is_causal"):
                    import_masks(kernel=kernel, **arguments)
                continue
            out = sdpa(inputs, enable_gqa=gqa, **arguments)
        made.append(import_masks(num_heads=N, kernel=kernel, **arguments))
        expected.append(turned(out))
        shape = None if attn_mask is None else (attn_mask.dtype, attn_mask.shape)
        what.append(f"{shape} {is_causal=}")
    assert len(made) == 2 * 85 - 3 * (28 if kernel == "math" else 8)
    stacked = arrays(made, T, S)
    actual = ours.heads([turned(x) for x in inputs], stacked, Semantics.torch_sdpa())
    for c, theirs in enumerate(expected):
        assert_close(actual[c], theirs, what[c], factor=FACTOR)
    assert not stacked["mask"].any(-1).all()


def test_structure_is_kept() -> None:
    T, S = 5, 7
    keep = given("bool", (True, False, False, True), T, S)
    mask, bias = import_masks(attn_mask=keep, is_causal=True)
    assert mask is not None
    assert (mask.causal_offset, bias) == (0, None)
    np.testing.assert_array_equal(mask.array, keep)
    inputs = heads(N, T), heads(N, S, 1), heads(N, S, 2)
    expected = sdpa(inputs, attn_mask=to_torch(keep), is_causal=True)
    query, key, value = (to_jax(turned(x)) for x in inputs)
    actual = dot_product_attention(query, key, value, mask=mask)
    assert_close(actual, turned(expected), factor=FACTOR)
    mask, bias = import_masks(attn_mask=np.where(keep, 0.0, -np.inf))
    assert mask is not None
    assert bias is None
    np.testing.assert_array_equal(mask.array, keep)


def test_a_causal_bias_has_its_own_corner() -> None:
    for make, offset in ((causal_upper_left, 0), (causal_lower_right, 4)):
        mask, bias = import_masks(attn_mask=make(3, 7))
        assert (mask, bias) == (Mask.causal(offset), None)


def test_other_widths_of_values_are_the_math_kernel() -> None:
    T, S = 5, 7
    inputs = heads(N, T), heads(N, S, 1), heads(N, S, 2, width=13)
    keep = given("bool", (True, True, True, True), T, S)
    with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set"):
        sdpa(inputs, attn_mask=to_torch(keep), is_causal=True)
    with pytest.raises(ValueError, match="to which it applies both"):
        import_masks(attn_mask=keep, is_causal=True, kernel="math")


def test_a_wider_mask_on_half_precision() -> None:
    """torch takes a float32 mask on float16 heads."""
    T, S = 5, 7
    inputs = [x.half() for x in (heads(N, T), heads(N, S, 1), heads(N, S, 2))]
    added = given("inf", (True, True), T, S)
    expected = sdpa(inputs, attn_mask=to_torch(added))
    mask, bias = import_masks(attn_mask=added)
    query, key, value = (to_jax(turned(x)) for x in inputs)
    actual = dot_product_attention(query, key, value, bias, mask)
    assert_close(actual, turned(expected))


@pytest.mark.parametrize(
    ("attn_mask", "error", "why"),
    [
        (np.ones((5, 7), np.int32), TypeError, "must be Boolean .* or floating"),
        (np.ones(7, bool), ValueError, r"expected axes \(#T #S\) or"),
        (np.ones((1, B, N, 5, 7), bool), ValueError, "expected axes"),
        (np.ones((B, 5, 7), bool), ValueError, "N=6"),
        (np.ones((B, N - 1, 5, 7), bool), ValueError, "N=6"),
    ],
)
def test_errors_are_those_of_torch(attn_mask: NDArray, error: Any, why: str) -> None:
    inputs = heads(N, 5), heads(N, 7, 1), heads(N, 7, 2)
    with pytest.raises((RuntimeError, IndexError)):
        sdpa(inputs, attn_mask=to_torch(attn_mask))
    with pytest.raises(error, match=why):
        import_masks(attn_mask=attn_mask, num_heads=N)


@pytest.mark.usefixtures("no_shape_hook")
def test_kernels_are_named() -> None:
    with pytest.raises(ValueError, match="kernel must be one of"):
        import_masks(kernel="cudnn")  # type: ignore[arg-type]


def test_export_is_the_smallest() -> None:
    sizes: dict[str, Any] = {"num_heads": N, "query_length": 5, "key_length": 7, "batch_size": B}
    keys = np.array([3, 6])
    assert export_masks(**sizes) == export_masks(Mask(), **sizes) == {}
    assert export_masks(Mask.causal(), **sizes) == {"is_causal": True}
    for mask, bias, shape in (
        (Mask.causal(offset=2), None, (5, 7)),
        (Mask.lengths(key_value=keys), None, (B, 1, 5, 7)),
        (Mask.causal() & Mask.lengths(query=keys), None, (B, 1, 5, 7)),
        (np.ones((N, 1, 7), bool), None, (N, 5, 7)),
        (None, np.zeros((B, 1, 1, 7), "f"), (B, 1, 1, 7)),
        (None, np.zeros((1, 7), "f"), (1, 7)),
        (Mask.causal(), np.zeros((N, 1, 1), "f"), (N, 5, 7)),
    ):
        made = export_masks(mask, bias, **sizes)
        assert list(made) == ["attn_mask"]
        assert made["attn_mask"].shape == shape
        assert (made["attn_mask"].dtype == np.bool_) == (bias is None)


def test_export_refuses_what_does_not_fit() -> None:
    sizes: dict[str, Any] = {"num_heads": N, "query_length": 5, "key_length": 7}
    with pytest.raises(ValueError, match=r"bias: expected axes \(#B, #N, #T, #S\)"):
        export_masks(None, np.zeros((3, 5, 7), "f"), **sizes)
    with pytest.raises(TypeError, match="bias must be floating"):
        export_masks(None, np.zeros((5, 7), bool), **sizes)
    with pytest.raises(ValueError, match="mask: expected axes"):
        export_masks(np.zeros((2, N, 5, 7), bool), **sizes)
