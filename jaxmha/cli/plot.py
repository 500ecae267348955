"""`jaxmha plot`: heat maps of heads, from an array, a checkpoint's block, or a model and a text."""

from collections.abc import Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

import jaxmha
from jaxmha import checkpoint
from jaxmha.checkpoint.atomic import replace_by
from jaxmha.cli import functions
from jaxmha.cli.console import check_place, escape, one_message, out, print_json, print_line
from jaxmha.cli.options import Block, Json, NumHeads, option, parse_integers
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.verify import load_block
from jaxmha.introspect import text_weights
from jaxmha.introspect.head_statistics import HeadStatistics, as_weights, head_statistics
from jaxmha.introspect.heatmaps import PICTURES, import_matplotlib, picture, plot_attention

EXAMPLES = (
    "Examples:\n\n  jaxmha plot weights.npz --tokens '[CLS] the cat sat [SEP]'\n\n"
    "  jaxmha plot weights.npz --array layer_3 --batch 0 --heads 0,3 --output heads.svg\n\n"
    "  jaxmha plot model.safetensors --block encoder.layer.0.attention --inputs inputs.npz\n\n"
    "  jaxmha plot bert/ --text 'the cat sat' --layer 3\n\n"
    "An .npz of inputs holds query (T, Dq) or (B, T, Dq), key and value if they differ from it, "
    "and mask (True = attend) if there is one."
)
INPUTS = ("query", "key", "value", "mask")


QueryLabels = Annotated[
    str | None,
    option("--tokens", "Labels of the queries: joined by spaces, or @FILE with one a line."),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Ends in .png, .svg or .pdf.")]


def command(
    file: Annotated[
        Path,
        typer.Argument(
            help="Weights, a checkpoint with --inputs, or with --text a folder of save_pretrained or "
            "MODULE:FUNCTION that builds a model.",
            show_default=False,
        ),
    ],
    array: Annotated[
        str | None, option("--array", "Name of the weights.  [default: the only array]")
    ] = None,
    inputs: Annotated[
        Path | None, option("--inputs", "Inputs of a block of the checkpoint (.npz).")
    ] = None,
    block: Block = None,
    num_heads: NumHeads = None,
    causal: Annotated[bool, option("--causal", "Causal mask, with --inputs.")] = False,
    text: Annotated[
        str | None, option("--text", "Run the model on this text, and draw one of its layers.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        option("--tokenizer", "With --text: the folder of the tokenizer.  [default: the model's]"),
    ] = None,
    layer: Annotated[
        int, option("--layer", "With --text: the layer, in the order of calls; -1 is the last.")
    ] = 0,
    tokens: QueryLabels = None,
    key_tokens: Annotated[
        str | None, option("--key-tokens", "Labels of the keys.  [default: --tokens]")
    ] = None,
    heads: Annotated[str | None, option("--heads", "Heads to draw: 0,3.  [default: all]")] = None,
    batch: Annotated[int | None, option("--batch", "Row of (B, N, T, S).")] = None,
    named: Annotated[
        str, option("--named", "Tokens whose share is printed, joined by commas.")
    ] = "[CLS],[SEP]",
    output: Output = Path("attention.png"),
    force: Annotated[bool, option("--force", "Overwrite the output.")] = False,
    as_json: Json = False,
) -> None:
    """Draw the attention of every head, and print to which keys it goes.

    With --inputs, a line names the positions and the mask of the model that were not applied.
    """
    with one_message():
        sources = [] if text else [file]
        check_picture(output, force, sources)
        not_applied = ""
        rows, columns = _tokens(tokens, "--tokens"), _tokens(key_tokens, "--key-tokens")
        if text is not None:
            if array is not None or inputs is not None:
                raise ValueError("--text runs a model: leave out --array and --inputs")
            title, weights, labels = _of_text(file, tokenizer, text, layer)
            rows = rows or labels
        else:
            title, weights, not_applied = _of_file(file, array, inputs, block, num_heads, causal)
        drawn = _draw(weights, rows, columns, heads, batch, title)
        replace_by(output, picture(drawn.figure, output.suffix), force=force, sources=sources)
        special = [token for token in named.split(",") if token in drawn.labels]
        found = head_statistics(drawn.maps, rows, columns, named=special)
        if as_json:
            data = {str(n): found[n]._asdict() for n in drawn.heads}
            print_json({"output": str(output), "heads": data, "not_applied": not_applied})
            return
        out.print(table({str(n): found[n] for n in drawn.heads}, special))
        if not_applied:
            print_line(f"not applied to these weights: {escape(not_applied)}")
        print_line(f"drawn in {escape(str(output))}")


def check_picture(path: Path, force: bool, sources: Sequence[Path] = ()) -> None:
    """Raises an error unless a picture can be drawn into this file; call it before long work."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"pictures are {', '.join(PICTURES)}, got {str(path)!r}")
    import_matplotlib()
    check_place(path, force, sources)


class _Drawn(NamedTuple):
    figure: Any
    maps: NDArray
    heads: Sequence[int]
    labels: Sequence[str]


def _draw(
    weights: NDArray,
    rows: Sequence[str] | None,
    columns: Sequence[str] | None,
    heads: str | None,
    batch: int | None,
    title: str,
) -> _Drawn:
    if weights.ndim == 4 and len(weights) == 1 and batch is None:
        batch = 0
    maps = as_weights(weights, batch)
    chosen = range(len(maps)) if heads is None else parse_integers(heads, "--heads")
    figure = plot_attention(maps, rows, columns, heads=chosen, title=title)
    labels = columns or (rows if maps.shape[1] == maps.shape[2] else None) or []
    return _Drawn(figure, maps, chosen, labels)


def _of_file(
    file: Path,
    array: str | None,
    inputs: Path | None,
    block: str | None,
    num_heads: int | None,
    causal: bool,
) -> tuple[str, NDArray, str]:
    """Returns a title, weights, and in words the positions and mask that these weights lack.

    The weights are stored in the file, or a block of it computes them from `inputs`.
    """
    if inputs is None and (block is not None or causal or num_heads is not None):
        raise ValueError("--block, --num-heads and --causal require --inputs")
    if inputs is not None and array is not None:
        raise ValueError("--array names weights, --inputs computes them: give one")
    if inputs is None:
        return "", _stored(file, array), ""
    return _computed(file, block, num_heads, inputs, causal)


def _of_text(
    model: Path, tokenizer: Path | None, text: str, layer: int
) -> tuple[str, NDArray, list[str]]:
    """Title, weights and tokens of a model that runs on a text."""
    made = functions.source_of(str(model))
    is_folder = isinstance(made, Path)
    if is_folder and not made.is_dir():
        raise ValueError(f"{model}: expected a folder of save_pretrained, or MODULE:FUNCTION")
    if tokenizer is None and not is_folder:
        raise ValueError("--text and MODULE:FUNCTION need --tokenizer FOLDER")
    split = text_weights.folder_tokenizer(str(tokenizer or made))
    live = text_weights.folder_model(str(made)) if is_folder else made
    found = text_weights.text_weights(live, split, text, layer)
    return f"{model.name}: layer {layer}", found.weights, found.tokens


def table(found: dict[str, HeadStatistics], named: list[str]) -> Table:
    """A table with one row per head."""
    made = Table(caption="means over queries; entropy in nats; shares of the attention in %")
    made.add_column("head")
    columns = ("entropy", "itself", "previous", "next", "first key", " ".join(named), "same token")
    known = [any(row[i] is not None for row in found.values()) for i in range(len(columns))]
    for name, shown in zip(columns, known, strict=True):
        if shown:
            made.add_column(escape(name), justify="right")
    for head, row in found.items():
        cells = [f"{row.entropy:.2f}"]
        cells += ["" if x is None else f"{100 * x:.1f}" for x in row[1:]]
        shown_cells = [cell for cell, shown in zip(cells, known, strict=True) if shown]
        made.add_row(head, *shown_cells)
    return made


def _stored(path: Path, name: str | None) -> NDArray:
    """The array with this name, or the only array with 2 to 4 axes, as weights have."""
    with checkpoint.open(path) as file:
        fitting = [key for key, info in file.info.items() if len(info.shape) in (2, 3, 4)]
        if name is not None and name not in file:
            raise ValueError(f"{path} has no array {name!r}; there are {', '.join(file)}")
        if name is None and len(fitting) != 1:
            shown = ", ".join(f"{key} {file.info[key].shape}" for key in fitting[:10]) or "none"
            raise ValueError(
                f"{path}: name one of its arrays of 2 to 4 axes by --array ({shown}), or give "
                "--inputs for a block of a checkpoint"
            )
        return file[fitting[0] if name is None else name]


def _computed(
    path: Path, name: str | None, num_heads: int | None, inputs: Path, causal: bool
) -> tuple[str, NDArray, str]:
    """Computes the weights of a block for the inputs, as `_of_file` returns them."""
    with checkpoint.open(inputs) as file:
        unknown = [key for key in file if key not in INPUTS]
        if unknown or "query" not in file:
            raise ValueError(
                f"{inputs}: expected arrays query, key, value and mask, of which query must be "
                f"there; got {', '.join(file) or 'none'}"
            )
        given: dict[str, Any] = {key: file[key] for key in file}
    block = load_block.read(path, name, num_heads)
    _, weights = jaxmha.multi_head_attention(
        block.params,
        **given,
        is_causal=causal,
        semantics=changed(block.semantics, dropout_rate=0.0),
        return_weights=True,
    )
    mask = block.mask if "mask" in given else "causal" if causal else ""
    title = f"{path.name}: {block.name or '(top)'}"
    return title, to_numpy(weights), block.not_applied(mask=mask)


def _tokens(text: str | None, option: str) -> list[str] | None:
    if text is None:
        return None
    if text.startswith("@"):
        path = Path(text[1:])
        try:
            return path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise ValueError(f"{path}: there is no such file; check the path") from None
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: expected UTF-8 text, one token a line, got byte "
                f"0x{error.object[error.start]:02x} at position {error.start}; save it as UTF-8"
            ) from None
    if not (parts := text.split()):
        raise ValueError(f"{option} is empty")
    return parts
