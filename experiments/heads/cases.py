"""When heads are the same as one head: constructed cases, each next to one a step away from it.

Outputs are equal for all values exactly where every head has the attention weights of the one
head. Each case makes that so in another way; in float64.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.heads.measure import Matrices, distance, drawn, split
from jaxmha import Semantics
from jaxmha.converters.verify import oracle


class Case(NamedTuple):
    """Two layers on the same inputs: h heads with `many`, one head with `single`.

    Attributes:
      equal: whether the outputs are equal but for rounding.
      query, key: inputs `B T E` and `B S E`; values are the keys.
    """

    name: str
    equal: bool
    many: Matrices
    single: Matrices
    query: NDArray[np.float64]
    key: NDArray[np.float64]


def cases(h: int, E: int, T: int, S: int, seed: int = 0) -> Iterator[Case]:
    """The cases, in pairs: one that is equal, and one that nearly is.

    >>> [case.equal for case in cases(2, 6, 3, 5)][:4]
    [True, False, True, False]
    """
    (wq, wk, wv), x = drawn(seed, E, 1, T)
    key = drawn(seed + 1, E, 1, S)[1]
    given = wq, wk, wv

    yield Case("one key", True, given, given, x, key[:, :1])
    yield Case("two keys", False, given, given, x, key[:, :2])

    none = np.zeros_like(wq), wk, wv
    yield Case("a query projection of zeros", True, none, none, x, key)
    some = wq * (np.arange(E) >= E - E // h), wk, wv
    yield Case("zeros in all heads but one", False, some, some, x, key)

    same = np.repeat(key[:, :1], S, axis=1)
    yield Case("identical keys", True, given, given, x, same)
    yield Case("identical keys but one", False, given, given, x, np.append(same, key[:, 1:2], 1))

    # Positive weights and inputs, one key far larger: all of the softmax is there, in every head.
    positive = np.abs(wq) * E, np.abs(wk) * E, wv
    large = np.abs(key)
    large[:, S // 2] *= 9
    yield Case("saturated at one key", True, positive, positive, np.abs(x), large)
    signs = np.where(np.arange(E) < E // h, -1.0, 1.0)
    turned = positive[0] * signs, positive[1], wv
    yield Case("saturated, one head at another key", False, turned, turned, np.abs(x), large)

    # The products of h equal blocks add up to h products; the scale of one head is sqrt(h) less.
    block = tuple(np.tile(w[:, : E // h], h) for w in (wq, wk))
    many = block[0], block[1], wv
    yield Case(
        "one block in all heads, Wq of one head divided by sqrt(h)",
        True, many, (many[0] / h**0.5, many[1], wv), x, key,
    )  # fmt: skip
    yield Case("one block in all heads, Wq as it is", False, many, many, x, key)


def outcome(case: Case, h: int) -> dict[str, Any]:
    """Relative difference of outputs, and the largest of weights, by the float64 oracle."""
    many, single = (
        oracle.run(split(matrices, heads), Semantics(), case.query, case.key, case.key)
        for matrices, heads in ((case.many, h), (case.single, 1))
    )
    return {
        "name": case.name,
        "equal": case.equal,
        "output": distance(single.output, many.output),
        "weights": float(np.abs(many.probabilities - single.probabilities).max()),
    }
