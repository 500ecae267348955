"""The first steps of training, of models that differ in how their attention starts."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.initialisation.frameworks import STARTS
from experiments.train import seeds
from experiments.train.data import Examples
from experiments.train.training import Settings

# One of every kind: torch's other needs other widths, and equinox is `Linear` without biases.
TRAINED = ("torch, packed", "torch, four Linear", "keras", "flax nnx")


def start(name: str) -> Callable[[Any, int], None]:
    """Puts a framework's own fresh layers in place of a model's; all else stays."""

    def begin(model: Any, seed: int) -> None:
        for i, block in enumerate(model.blocks):
            attention = block.attention
            D, N, _ = attention.query.kernel.shape
            drawn = STARTS[name].theirs(1000 * seed + i, D, N)
            for projection in ("query", "key", "value", "out"):
                part = getattr(attention, projection)
                part.kernel[...] = drawn[f"{projection}.kernel"]
                part.bias[...] = drawn.get(f"{projection}.bias", 0.0)

    return begin


def curves(
    settings: Settings,
    examples: tuple[Examples, Examples],
    count: int,
    window: int,
    progress: Callable[[], None],
    names: Sequence[str] = TRAINED,
) -> dict[str, Any]:
    """Losses of every start, from the same other weights and the same batches."""
    return {
        name: seeds.train(
            settings,
            examples,
            range(count),
            begin=start(name),
            window=window,
            progress=progress,
        )
        for name in names
    }
