"""A case: one computation to time. Dimension letters are B T S N K H h; E = N * H."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Scope = Literal["layer", "core"]
Direction = Literal["forward", "backward"]
Kind = Literal["plain", "causal", "padded", "gqa", "cross", "decode"]
Bounds = NDArray[np.int64]
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Case:
    """One computation to time.

    `layer` is multi-head attention with its four projections, on features of width E; `core` is
    attention alone, on projected heads. `backward` is forward and backward together.

    Attributes:
      h: features of a value head; 0: H.
      causal: True makes another `kind`, such as `lengths`, causal too; `causal` itself needs no flag.
      window: queries attend keys at most this far away; None: any.
      packed: number of sequences in a batch row, which do not attend each other; 0: one.
      bias: an additive bias `1 N T S`.
      boolean: lengths are given as Booleans, `B S`.
      by_lengths: packed sequences are given by their lengths where a peer takes these, not by ids.
      tf32: peers that can round float32 products to TF32 do; False: no peer does.
    """

    scope: Scope
    direction: Direction
    kind: Kind
    B: int
    T: int
    S: int
    N: int = 8
    K: int = 8
    H: int = 64
    quick: bool = False
    dtype: str = "float32"
    h: int = 0
    causal: bool = False
    window: int | None = None
    packed: int = 0
    bias: bool = False
    boolean: bool = False
    by_lengths: bool = False
    tf32: bool = False

    @property
    def name(self) -> str:
        """The unique name of the case.

        >>> Case("layer", "forward", "plain", 2, 512, 512).name
        'layer-forward-plain-B2-T512-E512'
        >>> Case("core", "backward", "causal", 2, 512, 512, window=64, dtype="bfloat16").name
        'core-backward-causal-B2-T512-E512-window64-bfloat16'
        """
        name = f"{self.scope}-{self.direction}-{self.kind}-B{self.B}-T{self.T}"
        name += f"-S{self.S}" if self.S != self.T else ""
        name += f"-E{self.E}"
        name += f"-K{self.K}" if self.K != self.N else ""
        name += f"-H{self.H}" if self.H != 64 else ""
        name += f"-h{self.h}" if self.h not in (0, self.H) else ""
        name += "-causal" if self.causal and self.kind != "causal" else ""
        name += "" if self.window is None else f"-window{self.window}"
        name += f"-packed{self.packed}" if self.packed else ""
        name += "-bias" * self.bias + "-boolean" * self.boolean
        name += "-lengths" * self.by_lengths + "-tf32" * self.tf32
        return name + (f"-{self.dtype}" if self.dtype != "float32" else "")

    @property
    def E(self) -> int:
        """Width of the features of a layer, N * H."""
        return self.N * self.H

    @property
    def is_causal(self) -> bool:
        """True if query i attends keys up to i only."""
        return self.causal or self.kind == "causal"

    @property
    def is_self_attention(self) -> bool:
        """True if a layer attends its own input, without another array of keys and values."""
        return self.kind not in ("cross", "decode") and self.S == self.T

    @property
    def value_features(self) -> int:
        """Features of a value head."""
        return self.h or self.H

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Keys of each batch row: full in the first, a quarter in the last; None: all full."""
        if self.kind == "padded":
            return tuple(
                self.S - (self.S - self.S // 4) * i // max(self.B - 1, 1) for i in range(self.B)
            )
        if self.kind == "decode":  # a cache that is not quite full
            return (max(self.S - 3, 1),) * self.B
        return None

    @property
    def segment_ids(self) -> NDArray[np.int32] | None:
        """The sequence of each position, `B T`; later sequences are longer. None: one sequence."""
        if not self.packed:
            return None
        starts = np.linspace(0, 1, self.packed, endpoint=False) ** 1.2 * self.T
        ids = np.searchsorted(starts.astype(int), np.arange(self.T), side="right") - 1
        return np.broadcast_to(ids.astype(np.int32), (self.B, self.T))

    @property
    def packed_lengths(self) -> NDArray[np.int32]:
        """Lengths of the packed sequences, `B packed`.

        >>> Case("core", "forward", "plain", 1, 7, 7, packed=2).packed_lengths.tolist()
        [[3, 4]]
        """
        assert self.segment_ids is not None
        lengths = np.bincount(self.segment_ids[0], minlength=self.packed)
        return np.broadcast_to(lengths.astype(np.int32), (self.B, self.packed))

    @property
    def bounds(self) -> tuple[Bounds, Bounds]:
        """First key that each query attends, and its last key plus 1: `B T` or `1 T`."""
        i = np.arange(self.T)[None]
        first, end = np.zeros_like(i), np.full_like(i, self.S)
        if self.is_causal:
            end = np.minimum(end, i + 1)
        if self.window is not None:
            first, end = np.maximum(first, i - self.window), np.minimum(end, i + self.window + 1)
        ids = self.segment_ids
        if ids is not None:
            first = np.maximum(first, np.searchsorted(ids[0], ids[0])[None])
            end = np.minimum(end, np.searchsorted(ids[0], ids[0], side="right")[None])
        if self.lengths is not None:
            end = np.minimum(end, np.array(self.lengths)[:, None])
        return first, np.maximum(end, first)

    @property
    def pairs(self) -> int:
        """Pairs of query and key that may attend, in one head, over the batch."""
        first, end = self.bounds
        count = int((end - first).sum())
        return count if len(end) == self.B else count * self.B

    @property
    def flop(self) -> float:
        """Floating-point operations that are needed; masked pairs, and keys and values that no
        query attends, count 0.

        Attention: 2 products forward, 5 more backward (scores are computed again). Projections:
        1 forward, 2 more backward.
        """
        H, h, backward = self.H, self.value_features, self.direction == "backward"
        total = 2.0 * self.N * self.pairs * (H + h + (3 * H + 2 * h) * backward)
        # A decoding step projects only its new tokens: the cache has keys and values of earlier ones.
        new = self.B * self.T if self.kind == "decode" else self.keys
        projections = 2.0 * self.E * (H + h) * (self.B * self.T * self.N + new * self.K)
        if self.scope == "layer":
            total += projections * (3.0 if backward else 1.0)
        return total

    @property
    def products(self) -> str:
        """The precision of the numbers that matrix units multiply: the dtype, or `tf32`."""
        return "tf32" if self.tf32 else self.dtype

    @property
    def keys(self) -> int:
        """The number of keys that some query attends, over the batch.

        >>> Case("core", "forward", "causal", 2, 3, 100).keys
        6
        """
        first, end = self.bounds
        allowed = end > first
        low, high = np.where(allowed, first, self.S).min(1), np.where(allowed, end, 0).max(1)
        return int(np.maximum(high - low, 0).sum()) * (1 if len(end) == self.B else self.B)

    @property
    def nbytes(self) -> float:
        """Least number of bytes to read and write: every input and result once.

        >>> Case("core", "forward", "decode", 1, 1, 103, 2, 1, 64).nbytes  # 100 keys and values
        52224.0
        """
        each, size = self.H + self.value_features, ITEMSIZE[self.dtype]
        bias = self.N * self.T * self.S * self.bias
        weights = self.E * (self.N + self.K) * each * (self.scope == "layer")

        def features(keys: int) -> int:
            queries = self.B * self.T
            if self.scope == "core" or self.kind == "decode":
                return (queries * self.N + keys * self.K) * each
            return (queries * 2 + keys * (not self.is_self_attention)) * self.E

        total = features(self.keys) + weights + bias
        if self.direction == "backward":
            # A cotangent, as large as the output, and gradients, as large as the inputs: gradients
            # of keys that no query attends are 0, and are written too.
            total += features(self.B * self.S) + weights
        return float(size * total)

    def bytes_with(self, stored: str | None) -> float:
        """`nbytes` for a cache of dtype `stored`: one byte per number, and two float32 scales per
        token and head, of the key and of the value; None: a cache of the dtype of the case.

        >>> Case("core", "forward", "decode", 1, 1, 103, 2, 1, 64).bytes_with("int8")
        14624.0
        """
        if stored is None:
            return self.nbytes
        keys = self.K * self.keys
        each = self.H + self.value_features
        return self.nbytes - keys * (each * (ITEMSIZE[self.dtype] - 1) - 2 * 4)

    @property
    def measures_memory(self) -> bool:
        """True if the memory of the case is worth measuring: materialised scores would take most."""
        return max(self.T, self.S) >= 2048 and self.kind != "decode"

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON; `Case(**fields)` restores the case."""
        return asdict(self)
