"""`jax.vmap` of the native kernels over an axis of size 0."""

from typing import Any

import jax
import numpy as np
import pytest

from tests import cases, conformance
from tests.test_native import CASE, attend, loss


@conformance.native_built
@pytest.mark.parametrize("mapped", ["query", "bias", "mask", "key_value_seq_lengths"])
def test_vmap_over_nothing(mapped: str) -> None:
    """A mapped operand without elements is not an absent one."""
    arrays = cases.arrays(CASE)

    def of(x: Any) -> Any:
        one = arrays | {mapped: x}
        return attend(one), jax.grad(loss)(*conformance.split(one))

    wanted = jax.eval_shape(of, arrays[mapped])
    for sizes in ((0,), (3, 0), (0, 3)):
        every = of
        for _ in sizes:
            every = jax.vmap(every)
        found = jax.jit(every)(np.zeros((*sizes, *arrays[mapped].shape), arrays[mapped].dtype))
        for x, one in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert (x.shape, x.dtype) == ((*sizes, *one.shape), one.dtype)
