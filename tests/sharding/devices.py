"""Eight devices, arrays on them, and comparison with one."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests import tolerance

# Two results are compared that may each be as far from the specification as it allows.
BOTH = 2.0


def mesh(explicit: bool = False, **sizes: int) -> Mesh:
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def put(mesh: Mesh, x: Any, *names: Any) -> Any:
    spec: Any = PartitionSpec
    return jax.device_put(x, NamedSharding(mesh, spec(*names)))


def assert_alike(got: Any, expected: Any, what: str = "") -> None:
    """Every leaf, within what rounding allows."""
    ours, theirs = (jax.tree_util.tree_leaves_with_path(x) for x in (got, expected))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, x), (_, y) in zip(ours, theirs, strict=True):
        name = f"{what} {jax.tree_util.keystr(path)}"
        tolerance.assert_close(np.asarray(x), np.asarray(y), name, factor=BOTH)
