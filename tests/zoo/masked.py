"""The mask that jaxmha reads for a block, with the padding that the runner gave its model."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxmha.converters.discovery.attended import Attended
from jaxmha.converters.layout.arrays import NDArray

BATCH = 2
FREE = "not read"  # the mask is then that of the model


class Given(NamedTuple):
    """The mask of a block as jaxmha knows it before the model runs.

    `attended`: what jaxmha reads; None: the caller of the model gives the mask. `paddings`: the
    masks of tokens that the runner gave, `B S` each.
    """

    attended: Attended | None
    paddings: Sequence[NDArray] = ()

    def against(self, seen: NDArray, extra: int = 0) -> tuple[NDArray, str]:
        """The mask to compute with, `B N T S`, and "" if it is what the model has, `seen`.

        `extra`: keys of the parameters after all others. The text is `FREE` if no mask is read, else
        it says how the masks differ; the mask is then the model's.
        """
        if self.attended is None:
            return seen, ""
        T, S = seen.shape[-2], seen.shape[-1] - extra
        if self.attended.scheme == "unknown":
            return seen, f"{FREE}: {self.attended.why or self.attended}; {described(seen[..., :S])}"
        for one in self._candidates(len(seen), T, S):
            if len(one) not in (1, len(seen)):
                continue
            whole = np.pad(one, [(0, 0)] * 3 + [(0, extra)], constant_values=True)
            if (np.broadcast_to(whole, seen.shape) == seen).all():
                return np.broadcast_to(whole, seen.shape), ""
        if self.attended.scheme == "full" and self.paddings and (seen == seen[:, :1, :1]).all():
            return seen, ""  # padding of keys that the model orders anew
        return seen, f"mask read as {self.attended}, the model has {described(seen[..., :S])}"

    def _candidates(self, batch: int, T: int, S: int) -> Iterator[NDArray]:
        """The mask that is read, alone and with every padding that fits its keys."""
        assert self.attended is not None
        if self.attended.scheme == "windows":
            yield from _windows(self.attended, batch, T)
            return
        own = np.asarray(self.attended.mask(T, S).to_array(T, S, np))
        own = np.broadcast_to(own, (*own.shape[:-2], T, S))
        yield own
        if T == S and T % BATCH == 0:  # images, one after the other
            yield own & np.kron(np.eye(BATCH), np.ones((T // BATCH,) * 2)).astype(bool)
        for padding in self.paddings:
            more = S - padding.shape[1]
            if batch % len(padding) or more < 0:
                continue
            rows = (
                padding if len(padding) == batch else np.repeat(padding, batch // len(padding), 0)
            )
            for before in {0, more}:  # tokens that the model adds are no padding
                keys = np.pad(rows, ((0, 0), (before, more - before)), constant_values=True)
                yield own & keys[:, None, None]
                if T == S:  # a model may mask the queries of padding as well
                    yield own & keys[:, None, None] & keys[:, None, :, None]


def _windows(attended: Attended, batch: int, T: int) -> Iterator[NDArray]:
    """The masks of square images, or one twice as high as wide, that have this many windows."""
    side = math.isqrt(T)
    for images in range(1, batch + 1):
        for tall in (1, 2, 4, 16):
            columns = math.isqrt(batch // images // tall)
            if columns * columns * tall * images == batch and side * side == T:
                for always in (False, True):
                    mask = attended.of_windows(columns * tall, columns, side, always)
                    yield np.tile(np.asarray(mask.array), (images, 1, 1, 1))


def described(seen: NDArray) -> str:
    """Names the kind of a mask `B N T S`; keys that no query of the row attends do not count."""
    first, S = seen[0, 0], seen.shape[-1]
    T = len(first)
    if (seen != seen[:, :1]).any():
        return "a mask by head"
    padded = bool((seen.any(-2) != seen[:1].any(-2)).any())
    apart = np.arange(T)[:, None] + S - T - np.arange(S)
    near = apart[first]
    if not near.size:
        return "nothing"
    left, right = int(near.max()), int(-near.min())
    exact = bool((first == ((apart <= left) & (apart >= -right))).all())
    text = f"{T} x {S}, left {'all' if left >= S - 1 else left}, right {'all' if right >= T - 1 else right}"
    text += "" if exact else ", of another form"
    return text + ", padded" * padded
