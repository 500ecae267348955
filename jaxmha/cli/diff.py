"""`jaxmha diff`: attributes the difference between two checkpoints' attention to its causes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from jaxmha import Mask, Semantics, checkpoint
from jaxmha.cli.console import (
    Json,
    NumHeads,
    escape,
    items,
    one_message,
    out,
    print_json,
    print_outside,
    print_some,
    print_verdict,
)
from jaxmha.converters.verify import attribution, comparison, forward_check, other_tensors
from jaxmha.converters.verify.attribution import Attribution, percent
from jaxmha.converters.verify.captured_layer import Inputs, Layer, as_inputs, of_block
from jaxmha.converters.verify.comparands import ComparedBlock
from jaxmha.converters.verify.weights import stored_differently
from jaxmha.semantics import PATHS

EXAMPLES = (
    "Examples:\n\n  jaxmha diff model.safetensors flax.safetensors\n\n"
    "  jaxmha diff before.pt after.pt --num-heads 8 --block encoder.layers.0.self_attn\n\n"
    "  jaxmha diff model.safetensors model.safetensors --mask empty --as-a torch:sdpa --as-b keras:fused\n\n"
    "  jaxmha diff model.safetensors model.safetensors --mask bottom-right --mask-b causal --json\n\n"
    "  jaxmha diff a.safetensors b.safetensors --inputs call.npz"
)
MASKS = {
    "none": Mask(),
    "padding": Mask.lengths(key_value=np.array(forward_check.LENGTHS)),
    "causal": Mask.causal(),
    "bottom-right": Mask.causal(forward_check.S - forward_check.T),
    "empty": Mask.lengths(key_value=np.array((*forward_check.LENGTHS[:-1], 0))),
}
MaskName = Enum("MaskName", {name: name for name in MASKS}, type=str)  # type: ignore[misc]
PRESETS = {f"{name}:{path}" for name, paths in PATHS.items() for path in paths}
INPUTS = {"query", "key", "value", "mask", "mask_a", "mask_b"}
WIDTH = 10  # characters of the bar for the whole difference


def diff(
    a: Annotated[Path, typer.Argument(help="One checkpoint.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="The other.", show_default=False)],
    block: Annotated[
        str | None, typer.Option(help="Only the block of this name (jaxmha inspect lists them).")
    ] = None,
    mask: Annotated[MaskName, typer.Option(help="Of both sides, on drawn inputs.")] = MaskName.none,  # type: ignore[attr-defined]
    mask_b: Annotated[MaskName | None, typer.Option(help="Of the second, instead.")] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Instead of drawn ones: a file with query (B T Dq), key, value (default: query), and "
            "mask, mask_a, mask_b (Boolean, broadcastable to B N T S, True = attend)."
        ),
    ] = None,
    as_a: Annotated[
        str | None,
        typer.Option(help=f"Behave as a path of a framework: {', '.join(sorted(PRESETS))}."),
    ] = None,
    as_b: Annotated[str | None, typer.Option(help="The same for the second.")] = None,
    num_heads: NumHeads = None,
    seed: Annotated[int, typer.Option(help="Of drawn inputs.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Say how much of the difference in output comes from what: weights, masks, scale, dtypes.

    The parts sum to the difference. Weights that are kept otherwise without effect, such as in
    another dtype, count too. Tensors outside attention are compared bit by bit, unless one --block
    is asked for. Exit code 1 if anything but rounding differs, or was not compared.
    """
    with one_message():
        file = None if inputs is None else _read(inputs)
        if file is not None and (mask is not MaskName.none or mask_b):  # type: ignore[attr-defined]
            raise ValueError("--mask is for drawn inputs: put masks into the file of --inputs")
        side_a, side_b = comparison.read_both(a, b, num_heads)
        pairs, only_a, only_b, notes = comparison.pair(side_a.blocks, side_b.blocks)
        if block is not None:
            pairs, only_a, only_b = [p for p in pairs if p[0].name == block], (), ()
        if not pairs:
            named = ", ".join(side.name or "(top)" for side in side_a.blocks[:5])
            raise ValueError(
                f"no block in common{f' named {block}' if block else ''}: {a} has {named}"
            )
        found: dict[str, Attribution] = {}
        for x, y in items("comparing", as_json)(pairs):
            given = _inputs(x, file, seed)
            masks = _masks(file) or (MASKS[mask.value], MASKS[(mask_b or mask).value])
            layers = [
                _behaving(of_block(side, given, each, side.name), preset)
                for side, each, preset in zip((x, y), masks, (as_a, as_b), strict=True)
            ]
            one = attribution.between(layers[0], layers[1], given)
            stored = stored_differently(x.params, y.params, one.changes_output)
            found[x.name or y.name] = replace(one, idle_weights=stored)
        missing = [*only_a, *only_b]
        rest = other_tensors.NOTHING
        if block is None:
            rest = other_tensors.compare(side_a.source, side_b.source)
            notes += (*rest.notes, *dict.fromkeys((*side_a.notes, *side_b.notes)))
        else:
            notes += (f"--block names only {block or '(top)'}: nothing else was compared",)
        different = bool(missing or rest.differing) or not all(x.same for x in found.values())
        same = not different and not rest.left
        if as_json:
            print_json(
                {
                    "same": same,
                    "different": different,
                    "blocks": {name: one.to_json() for name, one in found.items()},
                    "only_a": only_a,
                    "only_b": only_b,
                    "notes": notes,
                    "outside": rest.differing,
                    "not_compared": [asdict(left) for left in rest.left],
                }
            )
        else:
            _print(found, missing, rest, notes)
            print_verdict(same, comparison.verdict(same, different, len(rest.left)))
    raise typer.Exit(0 if same else 1)


def _print(
    found: Mapping[str, Attribution],
    missing: Sequence[str],
    rest: other_tensors.Outside,
    notes: Sequence[str],
) -> None:
    for name, one in found.items():
        show(name, one)
    for name in missing:
        out.print(f"only on one side: {escape(name)}", highlight=False)
    print_outside(rest.differing, rest.left)
    for note in notes:
        out.print(escape(note), highlight=False)


def show(name: str, found: Attribution) -> None:
    """Prints a table of the parts with bars; a part that reduces the difference is red."""
    title = f"{escape(name or '(top)')}: {found.headline}"
    if found.compared:
        title += f", {found.floor:.2g} is rounding"
    if not found.parts:
        out.print(f"{title}", highlight=False)
    else:
        table = Table(title=title, title_justify="left")
        table.add_column("part", overflow="fold")
        table.add_column("share", justify="right")
        table.add_column("size", justify="right")
        table.add_column("", width=WIDTH)
        table.add_column("what", overflow="fold")
        for part in found.parts:
            bar = "█" * min(WIDTH, round(abs(part.share) * WIDTH)) or "▏"
            colour = "red" if part.share < 0 else "cyan"
            table.add_row(
                escape(part.name),
                percent(part.share),
                f"{part.size:.3g}",
                f"[{colour}]{bar}[/{colour}]",
                escape(part.text),
            )
        out.print(table)
    for sentence in found.idle:
        out.print(f"without effect here: {escape(sentence)}", highlight=False)
    print_some(
        [f"[red]kept otherwise:[/red] {escape(sentence)}" for sentence in found.idle_weights],
    )


def _read(path: Path) -> dict[str, Any]:
    with checkpoint.open(path) as file:
        arrays = {name: np.asarray(file[name]) for name in file.info}
    if unknown := arrays.keys() - INPUTS:
        raise ValueError(
            f"{path}: expected {', '.join(sorted(INPUTS))}, got {', '.join(sorted(unknown))}"
        )
    if "query" not in arrays:
        raise ValueError(f"{path}: there is no query (B, T, Dq) in it")
    return arrays


def _inputs(side: ComparedBlock, file: dict[str, Any] | None, seed: int) -> Inputs:
    if file is None:
        return forward_check.inputs(side, seed)
    given = {name: file[name] for name in ("query", "key", "value") if name in file}
    return as_inputs(given, side.params)


def _masks(file: dict[str, Any] | None) -> tuple[Any, Any] | None:
    if file is None:
        return None
    common = file.get("mask")
    return file.get("mask_a", common), file.get("mask_b", common)


def _behaving(layer: Layer, preset: str | None) -> Layer:
    if preset is None:
        return layer
    if preset not in PRESETS:
        raise ValueError(f"no path is called {preset!r}: there are {', '.join(sorted(PRESETS))}")
    framework, path = preset.split(":")
    options: dict[str, Any] = {} if framework in ("jax", "torch_sdpa") else {"dtype": layer.dtype}
    verb = getattr(Semantics, framework)
    like = verb(**options) if framework in ("jax", "torch_sdpa") else verb(path, **options)
    fields = {"fully_masked": like.fully_masked, "softmax_dtype": like.softmax_dtype}
    return replace(layer, semantics=replace(layer.semantics, **fields))
