"""What jaxmha makes of a saved model: its blocks, what is said, and conversions there and back."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxmha import MHAParams, Semantics, checkpoint
from jaxmha.converters.discovery import (
    attended,
    attention_blocks,
    behaviours,
    described,
    head_count,
    latent_blocks,
    unknown_attention,
)
from jaxmha.converters.discovery.all_positions import positions_of
from jaxmha.converters.discovery.attention_blocks import Block, named
from jaxmha.converters.layout import transform
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.migrate.conversion import Conversion
from tests.zoo import latent

TARGETS = ("flax", "torch-separate", "torch", "llama", "linear", "linear-wo", "keras-gqa", "jaxmha")
Heads = Callable[[str], int | None] | None
_FINAL = (
    "config.json has",
    "no attention block",
    "looks like",
    "unknown key",
    " is of ",
)  # for every target


def read(
    folder: Path, heads: Heads = None, whole: bool = True
) -> tuple[list[tuple[Block, MHAParams | None, Semantics | None, str]], dict[str, Any]]:
    """Every block of a saved model, with its parameters or the refusal; and what `inspect` says."""
    files = [x for x in folder.iterdir() if x.name.endswith((".safetensors", ".index.json"))]
    source = next((f for f in files if f.name.endswith(".index.json")), files[0])
    info = pipeline.inspect(source)
    other = heads is not None  # a model of another library, whose masks its caller gives
    blocks: list[tuple[Block, MHAParams | None, Semantics | None, str]] = []
    with checkpoint.open(source) as file:
        shapes = attention_blocks.shapes(file)
        found = behaviours.configured(attention_blocks.find(shapes), file)
        told = described.of(file, found)
        heads = None if told.heads is not None else heads
        tensors = _Lazy(file)
        for block in found:
            try:
                count, _ = head_count.find(
                    block, shapes, heads and heads(block.prefix), file.metadata, told.heads
                )
                params, semantics = block.read(tensors, count)
                state = {
                    block.layout.path(block.prefix, k): to_numpy(tensors[n])
                    for k, n in block.keys.items()
                }
                back = transform.export_params(block.layout, params, semantics, prefix=block.prefix)
                same = back.keys() == state.keys() and all(
                    np.array_equal(back[k].view(np.uint8), state[k].view(np.uint8)) for k in state
                )
                blocks.append((block, params, semantics, "" if same else "not back bit by bit"))
            except ValueError as error:
                blocks.append((block, None, None, str(error)))
        latents = latent.read(file)
        known = latent_blocks.find(file)
        prefixes = [block.prefix for block in found] + [block.prefix for block in latents]
        masks = {} if other else attended.of_prefixes(file, found, prefixes)
    places = positions_of(source)
    said: dict[str, Any] = {
        "places": places,
        "masks": masks,
        "damaged": list(info.damaged),
        "notes": list(info.notes),
    }
    refused = [b.prefix for b, p, *_ in blocks if p is None]
    refused += [text.split(" ")[0] for text in info.damaged]
    apart = unknown_attention.find({n: tuple(s) for n, s in shapes.items()}, found, refused)
    apart = {prefix: tuple(n) for prefix, n in latent_blocks.without(apart, known).items()}
    said["latents"] = latents
    said["claims"] = list(_claims(source, refused))
    said["apart"] = list(_claims(source, list(apart)))
    said["carried"] = list(apart)
    layouts = [b.layout.name for b, p, *_ in blocks if p is not None]
    said |= converted(source, layouts + [b.form for b in known], heads, whole)
    return blocks, said


def _claims(source: Path, prefixes: list[str]) -> Iterator[tuple[int, float, float]]:
    """Length, first and last number of a row of every matrix under these prefixes."""
    with checkpoint.open(source) as file:
        for name, info in file.info.items():
            if len(info.shape) >= 2 and any(name.startswith(f"{p}.") for p in prefixes if p):
                row = to_numpy(file[name])[0].reshape(-1)
                yield len(row), float(row[0]), float(row[-1])


class _Lazy(dict[str, Any]):
    def __init__(self, file: checkpoint.Checkpoint) -> None:
        super().__init__()
        self.file = file

    def __missing__(self, name: str) -> Any:
        self[name] = found = to_numpy(self.file[name])
        return found


def converted(
    source: Path, layouts: list[str], heads: Heads = None, whole: bool = True
) -> dict[str, Any]:
    """Converts the whole file to the first layout that holds it, and back: bit by bit the same.

    `whole`: among all of `TARGETS`; else the first, or the last, which holds most.
    `heads`: from the prefix of a block to its head count, where no configuration has it.
    """
    why: list[str] = []
    targets = TARGETS if whole else (TARGETS[0], TARGETS[-1])
    ways = [(to, fold) for fold in (False, True) for to in (targets if layouts else TARGETS[:1])]
    if "deepseek" in layouts:  # latent attention, which other layouts cannot hold
        ways = [("jaxmha", False)]
    for to, fold in ways:
        there, back = source.parent / "there.safetensors", source.parent / "back.safetensors"
        if fold and not any("scale" in one for one in why):
            continue
        try:
            done = _convert(source, there, to, fold, heads)
        except ValueError as error:
            why.append(f"{to}: {error}".replace(f"{source.parent}/", ""))
            if any(sign in str(error) for sign in _FINAL):
                break
            continue
        found: dict[str, Any] = {"to": to, "notes_converted": list(done.notes), "back": ""}
        kinds = list(dict.fromkeys(layouts))
        if kinds == ["deepseek"] or len(kinds) == 1:
            found["back"] = _back(source, there, back, kinds[0], fold)
        else:  # one layout after the other, each there and back with all else carried over
            found["back"] = _each(source, to, kinds, fold, heads)
        return found
    return {"to": "", "refused": why}


def _back(source: Path, there: Path, back: Path, layout: str, fold: bool) -> str:
    """ "same" if a conversion to the layout of the source is the source, bit by bit."""
    try:
        pipeline.convert(there, back, to=layout, force=True, fold_scale=fold, digest=None)
    except ValueError as error:
        return f"refused: {error}"
    return _same(source, back)


def _each(source: Path, to: str, layouts: list[str], fold: bool, heads: Heads) -> str:
    """The first way back of one layout among several that is not the source; else "same"."""
    if "deepseek" in layouts or heads is not None:
        return ""
    if to in layouts:
        return f"refused: blocks were of layout {to} before, and are not told apart"
    there, back = source.parent / "there.safetensors", source.parent / "back.safetensors"
    for layout in layouts:
        try:
            pipeline.convert(
                source, there, to=to, from_=layout, force=True, fold_scale=fold, digest=None
            )
            pipeline.convert(
                there, back, to=layout, from_=to, force=True, fold_scale=fold, digest=None
            )
        except ValueError as error:
            return f"refused: {layout}: {error}"
        if (found := _same(source, back)) != "same":
            return found
    return "same"


def _convert(source: Path, there: Path, to: str, fold: bool, heads: Heads) -> Conversion:
    """Converts with a plan in which every block has its head count, as a person would edit it."""
    if heads is None:
        return pipeline.convert(source, there, to=to, force=True, fold_scale=fold, digest=None)
    with checkpoint.open(source) as file:
        found = attention_blocks.find(attention_blocks.shapes(file))
    counts = dict.fromkeys(n for block in found if (n := heads(block.prefix)))
    for given in (*counts, 1):
        try:
            drafted, _ = pipeline.plan(source, to=to, num_heads=given, fold_scale=fold)
            break
        except ValueError as error:
            if given == 1 or "expected axes" not in str(error):
                raise
    steps = [
        replace(step, num_heads=heads(step.source))
        if step.kind == "attention" and not named(step.layout).stores_num_heads
        else step
        for step in drafted.steps
    ]
    return pipeline.convert(
        source, there, plan=replace(drafted, steps=tuple(steps)), force=True, digest=None
    )


def _same(one: Path, other: Path) -> str:
    with checkpoint.open(one) as a, checkpoint.open(other) as b:
        if a.info.keys() != b.info.keys():
            return f"names differ: {sorted(a.info.keys() ^ b.info.keys())[:4]}"
        for name in a.info:
            x, y = to_numpy(a[name]), to_numpy(b[name])
            if x.shape != y.shape or x.tobytes() != y.tobytes():
                return f"{name} differs"
    return "same"
