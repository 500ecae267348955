"""Dequantises the blocks of GGML to float32; the `gguf` package gives the same bits.

Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_NIBBLES = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
_PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)


class Blocks(NamedTuple):
    """A quantised type: its name, weights and bytes of one block, and a function for blocks.

    `dequantise` takes uint8 `blocks nbytes` and returns float32 `blocks size`.
    """

    name: str
    size: int
    nbytes: int
    dequantise: Callable[[Bytes], Floats]


def _half(raw: Bytes) -> Floats:
    """The float16 numbers in `blocks 2` bytes, as float32 `blocks 1`."""
    found: Floats = np.ascontiguousarray(raw).view("<f2").astype(np.float32)
    return found


def _q4_0(raw: Bytes) -> Floats:
    low = (raw[:, 2:].reshape(len(raw), 1, 1, 16) >> _NIBBLES) & np.uint8(15)
    return _half(raw[:, :2]) * (low.reshape(len(raw), 32).astype(np.int8) - np.int8(8))


def _q8_0(raw: Bytes) -> Floats:
    return raw[:, 2:].view(np.int8).astype(np.float32) * _half(raw[:, :2])


def _q4_k(raw: Bytes) -> Floats:
    n = len(raw)
    scale, low = _half(raw[:, :2]), _half(raw[:, 2:4])
    # 8 scales and 8 minima of 6 bits each. The upper two bits of the last four are in the bytes of
    # the first four.
    a, b, c = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    factors = np.concatenate([a & 63, (c & 15) | ((a >> 2) & 48)], axis=1)
    minima = np.concatenate([b & 63, (c >> 4) | ((b >> 2) & 48)], axis=1)
    numbers = (raw[:, 16:].reshape(n, 4, 1, 32) >> _NIBBLES) & np.uint8(15)
    scaled = (scale * factors).reshape(n, 8, 1) * numbers.reshape(n, 8, 32).astype(np.float32)
    made: Floats = (scaled - (low * minima).reshape(n, 8, 1)).reshape(n, 256)
    return made


def _q6_k(raw: Bytes) -> Floats:
    n = len(raw)
    low = (raw[:, :128].reshape(n, 2, 1, 64) >> _NIBBLES) & np.uint8(15)
    high = (raw[:, 128:192].reshape(n, 2, 1, 32) >> _PAIRS) & np.uint8(3)
    numbers = low.reshape(n, 8, 32) | (high.reshape(n, 8, 32) << np.uint8(4))
    signed = (numbers.astype(np.int8) - np.int8(32)).astype(np.float32).reshape(n, 16, 16)
    scales = _half(raw[:, 208:]) * np.ascontiguousarray(raw[:, 192:208]).view(np.int8)
    made: Floats = (scales.reshape(n, 16, 1) * signed).reshape(n, 256)
    return made


QUANTISED = {
    2: Blocks("Q4_0", 32, 18, _q4_0),
    8: Blocks("Q8_0", 32, 34, _q8_0),
    12: Blocks("Q4_K", 256, 144, _q4_k),
    14: Blocks("Q6_K", 256, 210, _q6_k),
}
# Names of unsupported types, for error messages.
OTHERS = {
    3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
