"""The GPU suite as data: shapes to time, and cases to compare with float64."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmha import Mask


@dataclass(frozen=True)
class Shape:
    """One thing to time. B * T tokens; letters as everywhere.

    Attributes:
      kind: full, causal, lengths, padding (the same keys, as Booleans), bias, or decode.
      backward: forward and backward together.
      peers: `all`, or `fast`: without those that hold all scores.
    """

    kind: str
    T: int
    H: int = 128
    N: int = 16
    K: int = 16
    tokens: int = 16384
    backward: bool = False
    peers: str = "fast"

    @property
    def B(self) -> int:
        """Batch."""
        return max(1, self.tokens // self.T)

    @property
    def name(self) -> str:
        """Unique.

        >>> Shape("causal", 2048, N=64, K=8, backward=True).name
        'causal-T2048-H128-N64/8-backward'
        """
        heads = f"N{self.N}" + (f"/{self.K}" if self.K != self.N else "")
        return f"{self.kind}-T{self.T}-H{self.H}-{heads}-" + (
            "backward" if self.backward else "forward"
        )

    @property
    def lengths(self) -> NDArray[np.int32] | None:
        """Keys of each batch row: all in the first, half in the last."""
        if self.kind not in ("lengths", "padding"):
            return None
        return np.linspace(self.T, self.T // 2, self.B).astype(np.int32)

    @property
    def flop(self) -> float:
        """Needed operations: 4 H per pair forward, 2.5 times that backward."""
        pairs = float(self.B * self.T * self.T)
        if self.kind == "causal":
            pairs = self.B * self.T * (self.T + 1) / 2
        if self.lengths is not None:
            pairs = float(self.T) * float(self.lengths.sum())
        return 4.0 * self.N * self.H * pairs * (3.5 if self.backward else 1.0)


def _grid() -> tuple[Shape, ...]:
    """Most telling first: what the time does not reach is listed as such."""
    found: list[Shape] = []
    for backward in (False, True):
        for kind in ("full", "causal"):
            found += [Shape(kind, T, backward=backward, peers="all") for T in (8192, 2048)]
    for kind in ("lengths", "padding", "bias"):
        found += [Shape(kind, 2048, backward=b, peers="all") for b in (False, True)]
    for backward in (False, True):
        for kind in ("full", "causal"):
            found.append(Shape(kind, 8192, N=64, K=8, backward=backward))
            found += [Shape(kind, T, backward=backward) for T in (16384, 4096, 1024, 512)]
            for H in (64, 256):
                found += [Shape(kind, T, H, 2048 // H, 2048 // H, backward=backward)
                          for T in (8192, 2048, 512)]  # fmt: skip
        found += [Shape(kind, 8192, backward=backward) for kind in ("lengths", "padding")]
        found += [Shape(kind, 2048, 64, 32, 32, backward=backward) for kind in ("bias", "padding")]
    return tuple(found)


SHAPES = _grid()
# (B, S, N, K, H) of one decoding step: at B * K >= 128 the bandwidth is what counts.
DECODE = ((64, 8192, 64, 8, 128), (16, 8192, 64, 8, 128), (128, 8192, 8, 1, 128), (4, 32768, 32, 8, 128))  # fmt: skip
# (T, E, N) of a whole layer, B * T = 16k.
LAYERS = ((2048, 2048, 16), (8192, 2048, 16))


@dataclass(frozen=True)
class Case:
    """One call to hold against float64.

    Attributes:
      name: for the report. Sizes as everywhere.
      mask: from `(rng, case)`.
      bias: axes of it, letters of BNTS or 1; `excludes`: some entries are -inf.
      shift: added to every logit by the bias (large and negative: lse is far below 0).
    """

    name: str
    T: int = 128
    S: int = 128
    B: int = 2
    N: int = 4
    K: int = 2
    H: int = 64
    h: int = 64
    mask: Callable[[Any, "Case"], Mask] = field(default=lambda rng, case: Mask())
    bias: str | None = None
    excludes: bool = False
    shift: float = 0.0


def _lengths(rng: Any, case: Case) -> Mask:
    return Mask.lengths(key_value=np.asarray([case.S // 3, case.S][: case.B], np.int32))


def _no_keys(rng: Any, case: Case) -> Mask:
    counts = np.asarray([0, case.S // 2], np.int32), np.asarray([case.T, case.T // 2], np.int32)
    return Mask.lengths(key_value=counts[0], query=counts[1])


def _left(rng: Any, case: Case) -> Mask:
    return Mask.padding(key_value=np.arange(case.S) >= np.asarray([[case.S // 3], [1]]))


def _holes(rng: Any, case: Case) -> Mask:
    return Mask.padding(key_value=rng.random((case.B, case.S)) < 0.6)


def _dense(rng: Any, case: Case) -> Mask:
    array = rng.random((case.B, 1, case.T, case.S)) < 0.5
    array[:, :, 0] = False
    return Mask.dense(array)


def _segments(rng: Any, case: Case) -> Mask:
    ids = [np.sort(rng.integers(0, 4, (case.B, n)), 1).astype(np.int32) for n in (case.T, case.S)]
    return Mask.segments(query_ids=ids[0], key_value_ids=ids[1])


def _causal(offset: int = 0) -> Callable[[Any, Case], Mask]:
    return lambda rng, case: Mask.causal(offset)


def _window(left: int, right: int) -> Callable[[Any, Case], Mask]:
    return lambda rng, case: Mask.window(left, right)


def _both(*masks: Callable[[Any, Case], Mask]) -> Callable[[Any, Case], Mask]:
    def joined(rng: Any, case: Case) -> Mask:
        mask = Mask()
        for one in masks:
            mask &= one(rng, case)
        return mask

    return joined


CASES: tuple[Case, ...] = (
    Case("full"),
    Case("causal", mask=_causal()),
    Case("causal, more keys", T=128, S=320, mask=_causal()),
    Case("causal, bottom-right", T=96, S=160, mask=_causal(64)),
    Case("causal, negative offset", mask=_causal(-17)),
    Case("window, left", mask=_window(31, 0)),
    Case("window, both sides", mask=_window(31, 9)),
    Case("window and lengths", T=160, S=96, mask=_both(_window(9, 0), _lengths)),
    Case("lengths", mask=_lengths),
    Case("lengths, causal", mask=_both(_causal(), _lengths)),
    Case("no keys", mask=_no_keys),
    Case("left padding", mask=_left),
    Case("left padding, causal", mask=_both(_causal(), _left)),
    Case("padding with holes, causal", mask=_both(_causal(), _holes)),
    Case("dense mask, empty rows", mask=_dense),
    Case("segments", mask=_segments),
    Case("bias", bias="BNTS"),
    Case("bias of heads", bias="1NTS"),
    Case("bias of keys", bias="111S"),
    Case("bias with -inf", bias="B1TS", excludes=True),
    Case("bias at 64 modulo 128", T=192, S=192, bias="1NTS", mask=_causal()),
    Case("lse far below 0", T=192, S=192, bias="1NTS", shift=-200.0),
    Case("multi-head", K=4),
    Case("multi-query", K=1),
    Case("H 72", H=72, h=72),
    Case("H 80, padding, causal", H=80, h=80, mask=_both(_causal(), _holes)),
    Case("H 128", H=128, h=128),
    Case("H 256", H=256, h=256, mask=_causal()),
    Case("h is not H", H=96, h=64, mask=_causal()),
    Case("T 77", T=77, S=77),
    Case("T 197, causal", T=197, S=197, mask=_causal()),
    Case("T 333, S 1023", T=333, S=1023),
    Case("one query", T=1, S=333, mask=_lengths),
    Case("one key", S=1),
)  # fmt: skip


def arrays(case: Case) -> tuple[dict[str, Any], Mask]:
    """float32 arrays (query, key, value, bias, cotangents of output and lse), and the mask."""
    rng = np.random.default_rng([1, *case.name.encode()])
    sizes = {"B": case.B, "N": case.N, "T": case.T, "S": case.S, "1": 1}
    B, T, S, N, K, H, h = case.B, case.T, case.S, case.N, case.K, case.H, case.h

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    found: dict[str, Any] = {
        "query": normal(B, T, N, H),
        "key": normal(B, S, K, H),
        "value": normal(B, S, K, h),
    }
    if case.bias is not None:
        bias = normal(*(sizes[axis] for axis in case.bias)) + np.float32(case.shift)
        if case.excludes:
            bias[rng.random(bias.shape) < 0.4] = -np.inf
        found["bias"] = bias
    found |= {"cotangent": normal(B, T, N, h), "lse_cotangent": normal(B, N, T)}
    return found, case.mask(rng, case)


def expected(arrays: dict[str, Any], mask: Mask, *, lse: bool) -> dict[str, Any]:
    """Output, lse and gradients in float64, written out; empty rows are 0 and -inf."""
    wide = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    query, key, value, cotangent = (
        np.moveaxis(wide[name], 2, 1) for name in ("query", "key", "value", "cotangent")
    )
    (B, N, T, H), (_, K, S, _) = query.shape, key.shape
    key, value = (np.repeat(x, N // K, 1) for x in (key, value))
    scale = H**-0.5
    logits = scale * query @ np.swapaxes(key, 2, 3)
    allowed = np.broadcast_to(mask.to_array(T, S, np), logits.shape)
    if "bias" in wide:
        logits = logits + wide["bias"]
    logits = np.where(allowed, logits, -np.inf)
    row_max = logits.max(3, keepdims=True)
    row_max = np.where(np.isfinite(row_max), row_max, 0.0)
    exps = np.exp(logits - row_max)
    row_sum = exps.sum(3, keepdims=True)
    weights = exps / np.where(row_sum == 0, 1.0, row_sum)
    out = weights @ value
    logit_gradient = cotangent @ np.swapaxes(value, 2, 3) - (cotangent * out).sum(3, keepdims=True)
    if lse:
        logit_gradient = logit_gradient + wide["lse_cotangent"][..., None]
    logit_gradient = logit_gradient * weights

    def heads(x: Any) -> Any:
        return np.moveaxis(x.reshape(B, K, N // K, S, x.shape[3]).sum(2), 1, 2)

    with np.errstate(divide="ignore"):
        row_lse = np.where(row_sum == 0, -np.inf, row_max + np.log(row_sum))[..., 0]
    found = {
        "out": np.moveaxis(out, 1, 2),
        "lse": row_lse,
        "query": np.moveaxis(scale * logit_gradient @ key, 1, 2),
        "key": heads(scale * np.swapaxes(logit_gradient, 2, 3) @ query),
        "value": heads(np.swapaxes(weights, 2, 3) @ cotangent),
    }
    if "bias" in wide:
        given = wide["bias"]
        axes = tuple(a for a, n in enumerate(given.shape) if n == 1)
        found["bias"] = logit_gradient.sum(axes, keepdims=True).reshape(given.shape)
    return found
