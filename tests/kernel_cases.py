"""The conformance suite on fused kernels, which take a part of its cases."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxmha
from jaxmha.implementations import UnsupportedError
from tests import cases, conformance
from tests.cases import CASES, Case

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
BY_NAME = {case.name: case for case in ALL}


def check(case: Case, implementation: str, dtype: str, *, lse: bool) -> None:
    """The suite where the implementation takes the case; else that it says why."""
    arrays = cases.arrays(case, dtype)
    options = {**case.options, "return_lse": lse, "implementation": implementation}
    if case.dropout_rate:
        options["dropout_key"] = jax.random.key(7)
    # The suite traces them, so that ids are not those of NumPy, which are read.
    asked = jax.tree.map(jnp.asarray, arrays)
    reason = dict(jaxmha.explain(**asked, **options).reasons)[implementation]
    if reason is None:
        conformance.kernel(case, implementation, dtype, lse=lse)
        return
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        conformance.kernel(case, implementation, dtype, lse=lse)
