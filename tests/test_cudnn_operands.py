"""Operands of cuDNN's kernels: lengths, bounds and numbers that exclude pairs, on their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha.implementations.fused import cudnn, cudnn_cached, cudnn_kernel
from jaxmha.implementations.fused.adapter import KernelInputs
from jaxmha.implementations.fused.cudnn_kernel import Settings
from jaxmha.implementations.tiled.block_mask import NO_CONDITIONS

put = jax.device_put
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("scale", [0.7, -0.7])
def test_a_barrier_lowers_the_logits_of_padded_keys(scale: float) -> None:
    query, key = (put(RNG.standard_normal((1, T, 2, 5)).astype("f")) for T in (3, 7))
    valid = put(np.arange(7)[None] < 4)
    more = cudnn._barrier(query, key, valid, scale)
    logits, plain = (scale * np.einsum("btnh,bsnh->bnts", q, k) for q, k in (more, (query, key)))
    np.testing.assert_allclose(logits[..., :4], plain[..., :4], rtol=1e-6, atol=1e-6)
    assert (logits[..., 4:] < -0.6 * cudnn.BARRIER**2).all()


def test_excluded_pairs_are_below_every_number_of_a_bias() -> None:
    heads = put(np.zeros((1, 2, 1, 8), jnp.bfloat16))
    bias = put(np.array([-3e38, -np.inf], jnp.bfloat16).reshape(1, 1, 1, 2))
    inputs = KernelInputs(heads, heads, heads, bias, NO_CONDITIONS, None, None, None, None, 1.0)
    added = np.asarray(cudnn._added(inputs), np.float64)
    assert (added[..., 0] == cudnn.LOWEST).all()
    assert (added[..., 1] == cudnn_kernel.EXCLUDED).all()


def test_lengths_end_where_a_window_leaves_no_key() -> None:
    """Row i attends valid keys j >= i - left: none from (number of keys) + left on."""
    valid = put(np.array([3, 0, 13], np.int32))
    queries, keys = cudnn._nonempty(None, valid, (3, 13, 13), causal=True, left=4)
    assert (queries.tolist(), keys.tolist()) == ([7, 0, 13], [3, 0, 13])


def test_a_shift_is_the_largest_bias_that_a_row_attends() -> None:
    bias = np.zeros((1, 1, 5, 5), np.float32)
    bias[..., 0] = far = 2 * cudnn_kernel.FAR
    for left, rows in ((None, 5), (2, 3)):
        found = cudnn_kernel._shift(Settings(1.0, True, left, True), put(bias), None)
        assert found[0, 0, :, 0].tolist() == [far] * rows + [0.0] * (5 - rows)


@pytest.mark.parametrize(("T", "S", "given"), [(64, 64, False), (63, 64, True), (64, 63, True)])
def test_lengths_are_given_for_odd_sizes(
    T: int, S: int, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them some releases of cuDNN return NaN gradients."""
    seen: list[Any] = []

    def forward(settings: Settings, lse: bool, query: Any, *operands: Any) -> Any:
        seen.append(operands[-1])
        return query, query[..., 0].swapaxes(1, 2)

    monkeypatch.setattr(cudnn_kernel, "_forward", forward)
    query, key = (put(np.zeros((1, size, 1, 8), np.float32)) for size in (T, S))
    cudnn_kernel._save(Settings(1.0, False, None), query, key, key, None, None)
    assert [x is not None for x in seen] == [given]
    assert not given or [x.tolist() for x in seen[0]] == [[T], [S]]


def test_rows_of_an_empty_cache_weigh_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(query: Any, *_: Any, lse: bool) -> Any:
        return query, jnp.zeros(query.shape[:3])

    monkeypatch.setattr(cudnn_cached, "_call", call)
    stored = cudnn_cached.Stored(*[put(np.zeros((2, 1, 5, 8), np.float32))] * 2)
    query = put(np.zeros((2, 1, 3, 8), np.float32))
    _, lse = cudnn_cached.rows(query, stored, put(np.array([0, 4], np.int32)), 1.0)
    assert lse[:, 0].tolist() == [[-np.inf] * 3, [0.0] * 3]


@pytest.mark.parametrize("lse", [False, True])
def test_a_bound_that_masks_every_pair_returns_lse_if_asked(lse: bool) -> None:
    query, key = (put(np.ones((1, n, 1, 8), np.float32)) for n in (3, 5))
    inputs = KernelInputs(query, key, key, None, NO_CONDITIONS, None, None, None, -3, 1.0)
    out, found = cudnn._run(inputs, lse=lse, in_place=False)
    assert not out.any()
    assert (found is not None) == lse
