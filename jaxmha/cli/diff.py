"""`jaxmha diff`: attributes the difference between two checkpoints' attention to its causes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from jaxmha import Mask, Semantics, checkpoint
from jaxmha.checkpoint.errors import listed
from jaxmha.cli.console import (
    escape,
    items,
    one_message,
    out,
    print_json,
    print_line,
    print_outside,
    print_some,
    print_verdict,
)
from jaxmha.cli.options import Json, NumHeads, option
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import (
    attribution,
    comparison,
    comparison_report,
    forward_check,
    keras_pairs,
    model_facts,
    other_tensors,
)
from jaxmha.converters.verify.attribution import Attribution, percent
from jaxmha.converters.verify.captured_layer import Inputs, Layer, as_inputs, of_block
from jaxmha.converters.verify.comparands import Comparand, ComparedBlock, require_blocks
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
InputsFile = Annotated[
    Path | None,
    option(
        "--inputs",
        "Instead of drawn inputs: a file with query (B T Dq), key, value (default: query), and "
        "mask, mask_a, mask_b (Boolean, broadcastable to B N T S, True = attend).",
    ),
]
Masks = tuple[Mask | NDArray | None, Mask | NDArray | None]
PRESETS = {f"{name}:{path}" for name, paths in PATHS.items() for path in paths}
INPUTS = {"query", "key", "value", "mask", "mask_a", "mask_b"}
WIDTH = 10  # characters of the bar for the whole difference


MaskOption = Annotated[MaskName, option("--mask", "Mask of both sources, for drawn inputs.")]


@dataclass(frozen=True)
class Difference:
    """The result of the command.

    Attributes:
        blocks: name -> attribution, for every block that both sources have.
        only_a, only_b: names of blocks that only the first, or only the second, source has.
        rest: comparison of the tensors outside attention.
        notes: remarks that are printed for the user.
        unproven: facts that no tensor shows, such as the order of layers in a Keras file.
        facts: facts of the models in no tensor that differ: positions, masks, norms.
    """

    blocks: Mapping[str, Attribution]
    only_a: Sequence[str]
    only_b: Sequence[str]
    rest: other_tensors.Outside
    notes: tuple[str, ...]
    unproven: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def different(self) -> bool:
        """True if anything but rounding differs."""
        missing = self.only_a or self.only_b or self.rest.differing or self.facts
        return bool(missing) or not all(one.same for one in self.blocks.values())

    @property
    def same(self) -> bool:
        """True if everything was compared and nothing but rounding differs."""
        return not self.different and not self.rest.left and not self.unproven

    def to_json(self) -> dict[str, Any]:
        """Returns all fields as JSON-compatible data."""
        return {
            "same": self.same,
            "different": self.different,
            "blocks": {name: one.to_json() for name, one in self.blocks.items()},
            "only_a": self.only_a,
            "only_b": self.only_b,
            "notes": self.notes,
            "outside": self.rest.differing,
            "not_compared": [asdict(left) for left in self.rest.left],
            "unproven": self.unproven,
            "facts": self.facts,
        }


def command(
    a: Annotated[Path, typer.Argument(help="One checkpoint.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="The other.", show_default=False)],
    block: Annotated[
        str | None, option("--block", "Compare only the block of this name (see jaxmha inspect).")
    ] = None,
    mask: MaskOption = MaskName.none,  # type: ignore[attr-defined]
    mask_b: Annotated[MaskName | None, option("--mask-b", "Another mask of the second.")] = None,
    inputs: InputsFile = None,
    as_a: Annotated[
        str | None,
        option("--as-a", f"Behave as a path of a framework: {', '.join(sorted(PRESETS))}."),
    ] = None,
    as_b: Annotated[str | None, option("--as-b", "The same for the second.")] = None,
    num_heads: NumHeads = None,
    seed: Annotated[int, option("--seed", "Seed of drawn inputs.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Print how much of the difference in output is due to weights, masks, scale, dtypes.

    The parts sum to the difference. Weights that are stored differently without effect, such as in
    another dtype, count too. Tensors outside attention are compared bit by bit, except with --block.
    Outputs are computed without positions; those of the two config.json are compared, with masks.
    Exit code 1 if anything differs but the rounding of the computation, or was not compared: weights
    that were rounded to another dtype differ (`jaxmha verify --dtype` accepts them).
    """
    with one_message():
        file = None if inputs is None else _read(inputs)
        if file is not None and (mask is not MaskName.none or mask_b):  # type: ignore[attr-defined]
            raise ValueError("--mask is for drawn inputs: put masks into the file of --inputs")
        masks = _masks(file) or (MASKS[mask.value], MASKS[(mask_b or mask).value])
        sources = comparison.read_both(a, b, num_heads)
        for source, path in zip(sources, (a, b), strict=True):
            require_blocks(source, path)
        pairs, only_a, only_b, notes = comparison.pair(sources[0].blocks, sources[1].blocks)
        if block is not None:
            pairs, only_a, only_b = [p for p in pairs if block in (p[0].name, p[0].path)], (), ()
        if not pairs and (block is not None or not sources[0].source.latents):
            named = ", ".join(one.name or "(top)" for one in sources[0].blocks[:5])
            raise ValueError(
                f"no block in common{f' named {block}' if block else ''}: {a} has {named}"
            )
        found: dict[str, Attribution] = {}
        for x, y in items("comparing", as_json)(pairs):
            drawn = _inputs(x, file, seed)
            found[x.name or y.name] = _attribute((x, y), drawn, masks, (as_a, as_b))
        rest, more = _rest(sources, block)
        unproven = () if block else keras_pairs.unproven(*(one.source for one in sources))
        facts = model_facts.compare(
            sources[0].source, sources[1].source, pairs, only_blocks=block is not None
        )
        every_note = (*notes, *more, *facts.notes, *_foldings(pairs))
        result = Difference(found, only_a, only_b, rest, every_note, unproven, facts.differing)
        if as_json:
            print_json(result.to_json())
        else:
            _print(result)
    raise typer.Exit(0 if result.same else 1)


def _attribute(
    pair: tuple[ComparedBlock, ComparedBlock],
    inputs: Inputs,
    masks: Masks,
    presets: tuple[str | None, str | None],
) -> Attribution:
    first, second = (
        _behaving(of_block(one, inputs, mask, one.name), preset)
        for one, mask, preset in zip(pair, masks, presets, strict=True)
    )
    found = attribution.between(first, second, inputs)
    return replace(
        found, idle_weights=stored_differently(pair[0].params, pair[1].params, found.changes_output)
    )


def _foldings(pairs: Sequence[tuple[ComparedBlock, ComparedBlock]]) -> Iterator[str]:
    """Notes on scales that are folded into queries: parts of weights and scale cancel."""
    names: dict[str, list[str]] = {}
    for x, y in pairs:
        if found := comparison.folding(x, y):
            names.setdefault(found, []).append(x.name or y.name or "(top)")
    yield from (f"{listed(blocks)}: {found}" for found, blocks in names.items())


def _rest(
    sources: tuple[Comparand, Comparand], block: str | None
) -> tuple[other_tensors.Outside, tuple[str, ...]]:
    """Compares the tensors outside attention, unless a block is named; also returns notes."""
    if block is not None:
        note = f"--block names only {block or '(top)'}: nothing else was compared"
        return other_tensors.NOTHING, (note,)
    rest = other_tensors.compare(sources[0].source, sources[1].source)
    return rest, (*rest.notes, *dict.fromkeys((*sources[0].notes, *sources[1].notes)))


def _print(result: Difference) -> None:
    for name, one in result.blocks.items():
        show(name, one)
    for name in (*result.only_a, *result.only_b):
        print_line(f"only in one source: {escape(name)}")
    print_outside(result.rest.differing, result.rest.left, result.facts)
    for note in result.notes:
        print_line(escape(note))
    left = len(result.rest.left)
    verdict = comparison_report.verdict(result.same, result.different, left, result.unproven)
    print_verdict(result.same, verdict)


def show(name: str, found: Attribution) -> None:
    """Prints a table of the parts with bars; a part that reduces the difference is red."""
    title = f"{escape(name or '(top)')}: {found.headline}"
    if found.compared:
        title += f", {found.floor:.2g} is rounding"
    if not found.parts:
        print_line(f"{title}")
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
        print_line(f"without effect here: {escape(sentence)}")
    print_some(
        [f"[red]stored differently:[/red] {escape(sentence)}" for sentence in found.idle_weights],
    )


def _read(path: Path) -> dict[str, NDArray]:
    with checkpoint.open(path) as file:
        arrays = {name: np.asarray(file[name]) for name in file.info}
    if unknown := arrays.keys() - INPUTS:
        raise ValueError(
            f"{path}: expected {', '.join(sorted(INPUTS))}, got {', '.join(sorted(unknown))}"
        )
    if "query" not in arrays:
        raise ValueError(f"{path}: there is no query (B, T, Dq) in it")
    return arrays


def _inputs(block: ComparedBlock, file: Mapping[str, NDArray] | None, seed: int) -> Inputs:
    if file is None:
        return forward_check.inputs(block, seed)
    given = {name: file[name] for name in ("query", "key", "value") if name in file}
    return as_inputs(given, block.params)


def _masks(file: Mapping[str, NDArray] | None) -> Masks | None:
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
    preset_of = getattr(Semantics, framework)
    # The presets of jax and torch_sdpa have one code path and take no dtype.
    like = preset_of() if framework in ("jax", "torch_sdpa") else preset_of(path, dtype=layer.dtype)
    fields = {"fully_masked": like.fully_masked, "softmax_dtype": like.softmax_dtype}
    return replace(layer, semantics=replace(layer.semantics, **fields))
