"""A window in a call whose last query has the position of the last key."""

import numpy as np

from jaxmha import Mask


def aligned_window(left: int | None, right: int | None, T: int, S: int) -> Mask:
    """The mask of a window of `left` keys before a query and `right` after it; None: no such bound.

    >>> aligned_window(1, None, 2, 4).to_array(2, 4, np).astype(int).tolist()
    [[[[0, 1, 1, 1], [0, 0, 1, 1]]]]
    """
    left = None if left is None else left - (S - T)
    right = None if right is None else right + S - T
    if (left or 0) >= 0 and (right or 0) >= 0:
        return Mask() if left is right is None else Mask.window(left, right)
    ahead = np.arange(S) - np.arange(T)[:, None]  # `Mask.window` takes no negative bound
    left, right = T if left is None else left, S if right is None else right
    return Mask.dense((ahead >= -left) & (ahead <= right))
