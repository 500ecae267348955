"""Moments of kernels, the distance of two samples, and what a layer does to noise."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats  # type: ignore[import-untyped]

from experiments.initialisation.frameworks import APART, STARTS, Leaves
from jaxmha import Semantics
from jaxmha.converters.verify import oracle
from jaxmha.params import from_leaves

D, N, SEEDS = 512, 8, 3
BINS = 60
MORE = 1.02  # a wrong spread that the test must see
KERNELS = ("query.kernel", "key.kernel", "value.kernel", "out.kernel")


def moments(sample: NDArray[Any]) -> dict[str, float]:
    """Spread, largest magnitude, and excess kurtosis (uniform: -1.2, normal: 0)."""
    sample = sample.astype(np.float64).ravel()
    return {
        "mean": float(sample.mean()),
        "std": float(sample.std()),
        "max": float(np.abs(sample).max()),
        "kurtosis": float(stats.kurtosis(sample)),
    }


def apart(a: NDArray[Any], b: NDArray[Any]) -> dict[str, float]:
    """Kolmogorov and Smirnov: are two samples of one distribution? Distance, and its p-value.

    The p-value is the one of large samples; that of `scipy.stats.ks_2samp` takes a second each.
    """
    a, b = np.sort(a.ravel()), np.sort(b.ravel())
    both = np.concatenate([a, b])
    shares = [np.searchsorted(x, both, side="right") / x.size for x in (a, b)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    scale = (a.size * b.size / (a.size + b.size)) ** 0.5
    return {"distance": distance, "p": float(special.kolmogorov(scale * distance))}


def compare(name: str, D: int = D, N: int = N, seeds: int = SEEDS) -> dict[str, Any]:
    """A framework's kernels and biases, and jaxmha's, all seeds together."""
    start = STARTS[name]
    theirs = [start.theirs(seed, D, N) for seed in range(seeds)]
    ours = [start.ours(seed, D, N) for seed in range(seeds)]
    kernels = {}
    for kernel in KERNELS:
        a, b = (np.stack([side[kernel] for side in sides]) for sides in (theirs, ours))
        edge = float(max(np.abs(a).max(), np.abs(b).max())) * 1.1
        counts = [np.histogram(x, BINS, (-edge, edge), density=True)[0] for x in (a, b)]
        kernels[kernel] = {
            "theirs": moments(a),
            "ours": moments(b),
            "test": apart(a, b),
            "test_of_more_spread": apart(a, b * MORE),
            "edge": edge,
            "histograms": [[float(f"{c:.4g}") for c in count] for count in counts],
        }
    biases = np.concatenate(
        [np.zeros(0), *(x.ravel() for side in theirs for n, x in side.items() if "bias" in n)]
    )
    return {
        "formula": start.formula,
        "counterpart": start.counterpart,
        "kernels": kernels,
        "biases": {"std": float(biases.std()), "max": float(np.abs(biases).max())}
        if biases.size
        else None,
        "noise": [noise(side, seed) for seed, side in enumerate(theirs)],
        "expected_logits": expected_logits(name, D),
    }


def noise(layer: Leaves, seed: int, T: int = 64) -> dict[str, float]:
    """Statistics of a new layer on random inputs of unit variance.

    `logits` and `output` are variances. `entropy` is the mean entropy of the attention weights
    relative to log S: 1 if all keys have the same weight.
    """
    rng = np.random.default_rng(seed)
    params = from_leaves(dict(layer))
    inputs = [rng.normal(size=(2, T, p.kernel.shape[0])) for p in params[:3]]
    if len({x.shape for x in inputs}) == 1:
        inputs = inputs[:1] * 3
    query, key, value = inputs
    stages = oracle.run(params, Semantics(), query, key, value)
    weights = stages.probabilities
    entropy = -(weights * np.log(weights)).sum(-1).mean() / np.log(T)
    return {
        "logits": float(stages.logits.var()),
        "entropy": float(entropy),
        "output": float(stages.output.var()),
    }


def expected_logits(name: str, D: int = D) -> float:
    """Variance of logits: D² times the variances of a query's and a key's kernel entry."""
    by_name = {
        "torch, packed": (2 / (4 * D), 2 / (4 * D), D),
        "torch, separate": (2 / (2 * D), 2 / (D // APART[0] + D), D // APART[0]),
        "torch, four Linear": (1 / (3 * D), 1 / (3 * D), D),
        "equinox": (1 / (3 * D), 1 / (3 * D), D),
    }
    query, key, width = by_name.get(name, (1 / D, 1 / D, D))
    bias = 1 / (3 * D) if name == "torch, four Linear" else 0.0
    return float((D * query + bias) * (width * key + bias))
