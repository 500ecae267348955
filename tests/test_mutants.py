"""The conformance suite bites: each classic error, made on purpose, fails a named check."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha import Mask, implementations
from jaxmha.implementations import reference
from jaxmha.implementations.base import Request, Result
from tests import conformance
from tests.cases import CASES


def _scale(request: Request) -> Request:
    return request._replace(semantics=replace(request.semantics, scale=1.0))


def _heads(request: Request) -> Request:
    """Query heads tiled over the key heads, not repeated: head n reads n % K."""
    (B, T, N, H), K = request.query.shape, request.key.shape[2]
    swapped = request.query.reshape(B, T, N // K, K, H).swapaxes(2, 3).reshape(B, T, N, H)
    return request._replace(query=swapped)


def _inverted(request: Request) -> Request:
    """Of arrays `B N T S`, and of what they say of rows or of keys alone."""
    changed: dict[str, Any] = {
        name: ~jnp.asarray(array)
        for name in ("array", "query_padding", "key_value_padding")
        if (array := getattr(request.mask, name)) is not None
    }
    return request._replace(mask=replace(request.mask, **changed)) if changed else request


def _bottom_right(request: Request) -> Request:
    if request.mask.causal_offset is None:
        return request
    offset = request.key.shape[1] - request.query.shape[1]
    return request._replace(mask=replace(request.mask, causal_offset=offset))


def _finite(request: Request) -> Request:
    """-1e9 in place of exclusion."""
    if request.mask.empty:
        return request
    T, S = request.query.shape[1], request.key.shape[1]
    added = jnp.where(request.mask.to_array(T, S), 0.0, -1e9).astype(request.query.dtype)
    bias = added if request.bias is None else request.bias + added
    return request._replace(mask=Mask(), bias=bias)


def _softmax(request: Request) -> Request:
    dtype = np.dtype(request.query.dtype)
    return request._replace(semantics=replace(request.semantics, softmax_dtype=dtype))


def _soft_cap(request: Request) -> Request:
    return request._replace(semantics=replace(request.semantics, logits_soft_cap=None))


def _bias(request: Request) -> Request:
    return request._replace(bias=None)


def _empty_rows(request: Request) -> Request:
    return request._replace(semantics=replace(request.semantics, fully_masked="mean"))


def _bfloat16(request: Request) -> Request:
    """Operands of float32 rounded on their way in."""
    rounded = {
        name: getattr(request, name).astype(jnp.bfloat16).astype(request.query.dtype)
        for name in ("query", "key", "value")
    }
    return request._replace(**rounded)


# The error, and the cases that have to notice it.
MUTANTS = {
    "scale dropped": (_scale, "float32", {"plain", "multi_query", "causal"}),
    "heads transposed": (_heads, "float32", {"plain", "bias_full"}),
    "Boolean mask inverted": (_inverted, "float32", {"mask_full", "mask_keys", "mask_rows"}),
    "causal bottom-right": (_bottom_right, "float32", {"causal", "causal_long"}),
    "-1e9 instead of exclusion": (_finite, "float32", {"empty_zero", "no_keys_left", "lengths"}),
    "softmax in input dtype": (_softmax, "bfloat16", {"plain", "multi_head"}),
    "soft cap dropped": (_soft_cap, "float32", {"soft_cap"}),
    "bias ignored": (_bias, "float32", {"bias_per_head"}),
    "fully masked rows uniform": (_empty_rows, "float32", {"empty_zero"}),
    "half precision inside": (_bfloat16, "float32", {"plain"}),
}


def killed_by(
    name: str, mutate: Any, dtype: str, by: set[str], monkeypatch: pytest.MonkeyPatch
) -> set[str]:
    """Which conformance cases, of those named, fail with the mutant in place of the reference."""

    def attend(request: Request) -> Result:
        return reference.attend(mutate(request))

    mutant = SimpleNamespace(unsupported_reason=reference.unsupported_reason, attend=attend)
    # Under its own name: compiled programs are kept by name.
    monkeypatch.setitem(implementations.IMPLEMENTATIONS, name, mutant)
    failed = set()
    for case in CASES:
        if case.name in by:
            try:
                conformance.values(case, name, dtype, jit=False)
            except AssertionError:
                failed.add(case.name)
    return failed


@pytest.mark.parametrize("mutation", MUTANTS)
def test_is_killed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, dtype, killers = MUTANTS[mutation]
    alive = killers - killed_by(mutation, mutate, dtype, killers, monkeypatch)
    assert not alive, f"{mutation!r} survives {', '.join(sorted(alive))}"


@pytest.mark.slow
def test_no_mutation_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, dtype, killers in MUTANTS.values():
        assert not killed_by("no mistake", lambda request: request, dtype, killers, monkeypatch)
