"""Training that can stop anywhere: after a restart the curve is the same, bit for bit."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from orbax import checkpoint as ocp

from experiments.train import data
from experiments.train.data import Examples
from experiments.train.model import Classifier, Settings


@dataclass
class Curve:
    """Loss of every step; steps, loss and accuracy of every evaluation on what is held out."""

    loss: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    held_out_loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


class Trainer:
    """Model and optimiser of some settings, before the first step."""

    def __init__(self, settings: Settings, examples: tuple[Examples, Examples]) -> None:
        self.settings, self.curve, self.earlier = settings, Curve(), 0.0  # seconds before this run
        self.examples, self.held_out = examples
        self.model = Classifier(settings, len(data.PACKAGES))
        rule = optimiser(settings.rate, settings.steps)
        self.optimizer = nnx.Optimizer(self.model, rule, wrt=nnx.Param)
        self.model.train()

    def step(self) -> float:
        """One step; its loss."""
        settings = self.settings
        batch = data.batch(self.examples, settings.batch, settings.seed, len(self.curve.loss))
        loss = float(_step(self.model, self.optimizer, *batch))
        self.curve.loss.append(loss)
        return loss

    def evaluate(self) -> None:
        """Loss and accuracy on what is held out, into the curve."""
        self.model.eval()
        size, found = self.settings.batch, []
        for start in range(0, len(self.held_out.labels), size):
            rows = np.arange(start, start + size) % len(self.held_out.labels)
            losses, right = judged(self.model, *self.held_out.take(rows))
            found.append(np.stack([losses, right]))
        self.model.train()
        loss, accuracy = np.concatenate(found, 1)[:, : len(self.held_out.labels)].mean(1)
        self.curve.steps.append(len(self.curve.loss))
        self.curve.held_out_loss.append(float(loss))
        self.curve.accuracy.append(float(accuracy))

    @property
    def state(self) -> Any:
        """The arrays that change from step to step, as a tree.

        The keys of random streams are left out: they follow from the seed.
        """
        changing = nnx.Not(nnx.RngKey)
        return nnx.to_pure_dict(nnx.state((self.model, self.optimizer), changing))

    def load(self, state: Any) -> None:
        """The way back from `state`."""
        kept = nnx.state((self.model, self.optimizer), nnx.Not(nnx.RngKey))
        nnx.replace_by_pure_dict(kept, state)
        nnx.update((self.model, self.optimizer), kept)


@cache
def optimiser(rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW on clipped gradients, its rate warmed up and cooled down.

    One object for equal arguments and one vector for all leaves: little to compile.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), steps)
    return optax.flatten(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)))


def train(
    settings: Settings,
    examples: tuple[Examples, Examples],
    folder: Path,
    *,
    resume: bool = False,
    progress: Callable[[Trainer], None] = lambda trainer: None,
) -> Trainer:
    """Trains, with a checkpoint at every evaluation; `progress` hears of every step.

    Raises:
      FileExistsError: there is a checkpoint, and `resume` is not asked for.
      FileNotFoundError: there is none, and `resume` is asked for.
      OSError: the folder cannot be made.
      ValueError: the checkpoint is one of other settings.
    """
    trainer, start = Trainer(settings, examples), time.perf_counter()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, create=not resume, enable_async_checkpointing=False
    )
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        last = manager.latest_step()
        if resume and last is None:
            raise FileNotFoundError(f"{folder} has no checkpoint to resume from")
        if last is not None:
            if not resume:
                raise FileExistsError(
                    f"{folder} has a checkpoint of step {last}: resume, or remove it"
                )
            _restore(manager, last, trainer)
        while len(trainer.curve.loss) < settings.steps:
            trainer.step()
            done = len(trainer.curve.loss)
            if done % settings.every == 0 or done == settings.steps:
                trainer.evaluate()
                seconds = trainer.earlier + time.perf_counter() - start
                notes = {"settings": asdict(settings), "curve": asdict(trainer.curve)}
                manager.save(
                    done,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardSave(trainer.state),
                        notes=ocp.args.JsonSave(notes | {"seconds": seconds}),
                    ),
                )
            progress(trainer)
    return trainer


def _restore(manager: Any, step: int, trainer: Trainer) -> None:
    notes = manager.restore(step, args=ocp.args.Composite(notes=ocp.args.JsonRestore())).notes
    own, other = asdict(trainer.settings), notes["settings"]
    different = [f"{k} {other.get(k)}, not {x}" for k, x in own.items() if x != other.get(k)]
    if different:
        raise ValueError(f"the checkpoint has other settings: {'; '.join(different)}")
    args = ocp.args.Composite(state=ocp.args.StandardRestore(trainer.state))
    trainer.load(manager.restore(step, args=args).state)
    trainer.curve, trainer.earlier = Curve(**notes["curve"]), notes.get("seconds", 0.0)


def side_by_side(
    settings: Sequence[Settings],
    examples: tuple[Examples, Examples],
    steps: int,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Loss of every step, in turns; seconds of the first, which compiles, and of a later one."""
    trainers = [Trainer(one, examples) for one in settings]
    seconds: list[list[float]] = [[] for _ in trainers]
    for _ in range(steps):
        for trainer, times in zip(trainers, seconds, strict=True):
            start = time.perf_counter()
            trainer.step()
            times.append(time.perf_counter() - start)
        progress()
    return [
        {
            "loss": trainer.curve.loss,
            "seconds_to_compile": times[0],
            "seconds_per_step": median(times[1:] or times),
        }
        for trainer, times in zip(trainers, seconds, strict=True)
    ]


def _losses(model: Any, texts: Any, lengths: Any, labels: Any) -> tuple[Any, Any]:
    logits = model(texts, lengths)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels), logits


@nnx.jit  # type: ignore[untyped-decorator]
def _step(model: Any, optimizer: Any, texts: Any, lengths: Any, labels: Any) -> Any:
    def mean(model: Any) -> Any:
        return _losses(model, texts, lengths, labels)[0].mean()

    loss, gradients = nnx.value_and_grad(mean)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit  # type: ignore[untyped-decorator]
def judged(model: Any, texts: Any, lengths: Any, labels: Any) -> tuple[Any, Any]:
    """Loss of every example, and whether its label was found."""
    losses, logits = _losses(model, texts, lengths, labels)
    return losses, jnp.argmax(logits, -1) == labels
