"""Fused kernels behind the contract: what surrounds them, exactly; they themselves where they run."""

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask
from jaxmha.implementations import UnsupportedError
from tests import cases, conformance, cudnn_contract, tolerance
from tests.cases import CASES, POISONED, Case
from tests.everyday import everyday


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU whose cuDNN is its documented contract."""
    calls = cudnn_contract.install(monkeypatch)
    with jaxmha.lowering_for("h200"):
        yield calls


# Beside the common ones: what is moved, padded or compacted.
MORE = (
    Case("one_query_causal", T=1, is_causal=True),
    Case("window_and_lengths", T=11, S=7, local_window_size=(2, 0),
         key_value_seq_lengths=(2, 0), query_seq_lengths=(11, 5)),
    Case("window_symmetric", T=7, S=11, local_window_size=3, key_value_seq_lengths=(3, 11)),
    Case("mask_keys_causal", mask="B11S", is_causal=True, T=7, S=7, H=8, h=8),
    Case("mask_keys_negative_scale", mask="B11S", is_causal=True, scale=-0.4),
    Case("mask_keys_window", mask="B11S", local_window_size=(3, 1), T=7, S=5),
    Case("mask_keys_lengths", mask="B11S", key_value_seq_lengths=(5, 3)),
    Case("mask_queries", mask="B1T1", empty_rows=True),
    Case("bias_causal_padded", bias="1NTS", bias_excludes=True, mask="B11S", is_causal=True),
    Case("power_of_two", H=16, scale=None, local_window_size=(3, 1), key_value_seq_lengths=(7, 3)),
    Case("mask_of_heads", mask="N1S", key_value_seq_lengths=(6, 2), is_causal=True),
)  # fmt: skip
ALL = (*CASES, *MORE)




# What each declines, by case; the others it answers.
def declines(case: Case, implementation: str, *, lse: bool) -> str | None:
    arrays = cases.arrays(case, "bfloat16")
    options = {**case.options, "return_lse": lse, "implementation": implementation}
    if case.dropout_rate:
        options["dropout_key"] = jax.random.key(7)
    return dict(jaxmha.explain(**arrays, **options).reasons)[implementation]


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("case", ALL, ids=cases.ids)
def test_cudnn(case: Case, lse: bool) -> None:
    if (reason := declines(case, "cudnn", lse=lse)) is not None:
        with pytest.raises(UnsupportedError, match=re.escape(reason)):
            conformance.kernel(case, "cudnn", "bfloat16", lse=lse)
        return
    conformance.kernel(case, "cudnn", "bfloat16", lse=lse)
