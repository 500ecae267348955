"""The cases to time on a GPU, most telling first, and who is timed on each."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from jaxmha.bench.case import Case
from jaxmha.bench.peers import peer as peer_of

PARTS = ("decode", "layers", "shapes")
# Tokens of a batch: sequences are fewer where they are longer.
TOKENS = 16384
DIRECTIONS = ("forward", "backward")
# (B, S, N, K) of attention over a cache: at B * K >= 64 the bandwidth is what counts.
CACHES = ((64, 8192, 64, 8), (16, 8192, 64, 8), (8, 8192, 64, 8), (128, 8192, 8, 1),
          (4, 32768, 32, 8), (64, 2048, 64, 8))  # fmt: skip
# Each peer that is timed -> None, or what its cases are like.
PEERS: dict[str, str | None] = {
    "jaxmha": None,
    "jaxmha:blocked": "packed",
    "jax-nn": "quick",
    "jax-nn:cudnn": None,
    "flax-linen": "layer",
    "flax-linen+jaxmha": "layer",
    "flax-nnx": "quick",
    "flax-nnx+jaxmha": "layer",
    "torch-sdpa": None,
    "torch-sdpa:cudnn": "core",
    "torch-sdpa:flash": "core",
    "torch-sdpa:efficient": "core",
    "torch-native": "inference",
    "torch-weights": "layer",
}


def _decode() -> Iterator[Case]:
    for B, S, N, K in CACHES:
        yield Case("core", "forward", "decode", B, 1, S, N, K, 128, True, "bfloat16")
    for T in (2, 4, 8, 16):
        yield Case("core", "forward", "decode", 16, T, 8192, 64, 8, 128, True, "bfloat16")
    yield Case("layer", "forward", "decode", 16, 1, 8192, 32, 8, 128, True, "bfloat16")


def _layers() -> Iterator[Case]:
    for T, direction in product((2048, 8192), DIRECTIONS):
        B = TOKENS // T
        yield Case("layer", direction, "causal", B, T, T, 16, 16, 128, True, "bfloat16")  # type: ignore[arg-type]


def _shapes() -> Iterator[Case]:
    def both(kind: Any, T: int, N: int = 16, K: int = 0, H: int = 128, **more: Any) -> Any:
        for direction in DIRECTIONS:
            sizes = TOKENS // T, T, T, N, K or N, H
            yield Case("core", direction, kind, *sizes, **{"dtype": "bfloat16"} | more)  # type: ignore[arg-type]

    kinds = ("plain", "causal")
    for kind in kinds:
        yield from both(kind, 8192, 64, 8)
        for T in (8192, 2048):
            yield from both(kind, T, quick=True)
    for kind, name in (("padded", ""), ("padded", "boolean"), ("plain", "bias")):
        yield from both(kind, 2048, quick=True, **({name: True} if name else {}))
    yield from both("causal", 8192, 64, 8, packed=12, by_lengths=True)
    yield from both("causal", 8192, window=128)
    yield from both("causal", 8192, H=192, h=128)
    for tf32 in (False, True):
        yield from both("causal", 2048, dtype="float32", tf32=tf32, quick=True)
    for kind, T in product(kinds, (16384, 4096, 1024, 512)):
        yield from both(kind, T)
    for kind, H, T in product(kinds, (64, 256), (8192, 2048, 512)):
        yield from both(kind, T, 2048 // H, H=H)
    for boolean in (False, True):
        yield from both("padded", 8192, boolean=boolean)
    yield from both("padded", 2048, 32, H=64, boolean=True)
    yield from both("plain", 2048, 32, H=64, bias=True)


CASES: tuple[Case, ...] = (*_decode(), *_layers(), *_shapes())


def part(case: Case) -> str:
    """The part of the suite that a case belongs to."""
    return "decode" if case.kind == "decode" else "layers" if case.scope == "layer" else "shapes"


def takes(name: str, case: Case) -> bool:
    """True if a peer is timed on the case: those that hold all scores on `quick` ones alone."""
    like = PEERS[name]
    layer, step = case.scope == "layer", case.kind == "decode"
    if layer and step:  # who has a cache
        return name in ("jaxmha", "jax-nn", "flax-linen", "flax-nnx")
    return {
        None: True,
        "packed": bool(case.packed),
        "quick": case.quick,
        "core": not layer,
        "layer": layer,
        "inference": layer and case.direction == "forward",
    }[like]


def installed() -> list[str]:
    """The peers that are there."""
    return [name for name in PEERS if not peer_of(name).absent]
