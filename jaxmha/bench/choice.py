"""The implementations of jaxmha that can compute a case here, and the one that it chooses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.bench.case import Case
from jaxmha.bench.jax_peers import Attend, of_jaxmha
from jaxmha.bench.limits import precision_of
from jaxmha.bench.peers import IMPLEMENTATIONS
from jaxmha.implementations import SupportQuery

SHAPE: Any = jax.ShapeDtypeStruct


def explain(case: Case) -> dict[str, Any]:
    """Returns the `chosen` implementation, all that are `supported`, `reasons` (name -> why it does not
    support the case, None: it does), and the `call` under which a benchmark is saved."""
    asked, all_of_them = SupportQuery(), SupportQuery(IMPLEMENTATIONS)
    with precision_of(case.products):
        for query in (asked, all_of_them):
            jax.eval_shape(_program(case, query), *_arguments(case))
    reasons = dict(asked.reasons)
    return {
        "chosen": next((name for name, reason in reasons.items() if reason is None), None),
        "supported": [name for name, reason in all_of_them.reasons if reason is None],
        "reasons": dict(all_of_them.reasons),
        "call": asked.call,
    }


def _program(case: Case, query: SupportQuery) -> Any:
    def run(q: Any, k: Any, v: Any, conditions: Any) -> Any:
        to = Attend(**conditions, causal=case.is_causal, window=case.window)
        return of_jaxmha(q, k, v, to, query)

    return run


def _arguments(case: Case) -> tuple[Any, ...]:
    B, T, S, N, K = case.B, case.T, case.S, case.N, case.K
    dtype = jnp.dtype(case.dtype)
    conditions: dict[str, Any] = {}
    if case.lengths is not None:
        conditions = {"lengths": SHAPE((B,), np.int32)}
        if case.boolean:
            conditions = {"keep": SHAPE((B, S), np.bool_)}
    if case.packed:
        conditions["segments"] = SHAPE((B, T), np.int32)
        if case.by_lengths:
            conditions["packed"] = SHAPE((B, case.packed), np.int32)
    if case.bias:
        conditions["bias"] = SHAPE((1, N, T, S), dtype)
    heads = ((B, T, N, case.H), (B, S, K, case.H), (B, S, K, case.value_features))
    return (*(SHAPE(shape, dtype) for shape in heads), conditions)
