"""`jaxmha bench`: times attention of the user's shapes on this machine, next to other libraries."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from jaxmha.bench import run as bench
from jaxmha.bench.case import Case
from jaxmha.bench.case import Kind as CaseKind
from jaxmha.bench.peers import IMPLEMENTATIONS, OURS
from jaxmha.bench.plot import draw
from jaxmha.cli.console import err, escape, one_message, out, print_json, print_line
from jaxmha.cli.options import Json, option
from jaxmha.cli.plot import check_picture
from jaxmha.implementations import preferences

EXAMPLES = (
    "Examples:\n\n  jaxmha bench attention -B 2 -T 2048 -N 16 -H 64 --causal\n\n"
    "  jaxmha bench attention -B 8 -T 4096 -N 32 -K 8 -H 128 --packed 12 --backward --save\n\n"
    "  jaxmha bench layer -B 4 -T 512 -N 8 -H 64 --lengths --plot layer.png\n\n"
    "  jaxmha bench decode -B 16 -S 8192 -N 64 -K 8 -H 128 --json\n\n"
    "  jaxmha bench attention -T 1024 -N 8 -H 64 --peer jaxmha:blocked --peer torch-sdpa"
)
KINDS = {
    "attention": "attention of projected heads",
    "layer": "multi-head attention with its projections",
    "decode": "few queries over a cache of keys and values",
}
Kind = Enum("Kind", {x: x for x in KINDS}, type=str)  # type: ignore[misc]
Rows = Annotated[int, option("--rounds", "Rounds; every round times every library once.", min=1)]
PlotFile = Annotated[
    Path | None, option("--plot", "Draw the times into this file: .png, .svg or .pdf.")
]


def command(
    kind: Annotated[
        Kind, typer.Argument(help="; ".join(f"{k}: {v}" for k, v in KINDS.items()) + ".")
    ],
    N: Annotated[int, option("-N", "Query heads.", min=1)],
    H: Annotated[int, option("-H", "Features of a query or key head.", min=1)],
    B: Annotated[int, option("-B", "Batch.", min=1)] = 1,
    T: Annotated[int | None, option("-T", "Queries.  [decode: 1]", min=1)] = None,
    S: Annotated[
        int | None, option("-S", "Keys; of decode: of the cache.  [default: T]", min=1)
    ] = None,
    K: Annotated[int | None, option("-K", "Key/value heads.  [default: N]", min=1)] = None,
    h: Annotated[int | None, option("-h", "Features of a value head.  [default: H]", min=1)] = None,
    dtype: Annotated[
        str | None,
        option(
            "--dtype", "float32, bfloat16 or float16.  [default: float32 on CPUs, else bfloat16]"
        ),
    ] = None,
    tf32: Annotated[
        bool, option("--tf32", "Products of float32 may be rounded to TF32, on GPUs.")
    ] = False,
    causal: Annotated[bool, option("--causal", "Causal mask, aligned top-left.")] = False,
    lengths: Annotated[bool, option("--lengths", "Keys of different lengths.")] = False,
    padding: Annotated[bool, option("--padding", "The same lengths, as Booleans.")] = False,
    packed: Annotated[int, option("--packed", "Sequences that are packed in a row.", min=0)] = 0,
    window: Annotated[int | None, option("--window", "Farthest key of a query.", min=0)] = None,
    bias: Annotated[bool, option("--bias", "An additive bias (1, N, T, S).")] = False,
    backward: Annotated[bool, option("--backward", "Forward and backward together.")] = False,
    layer: Annotated[bool, option("--layer", "decode: with projections and writing.")] = False,
    peer: Annotated[
        list[str] | None, option("--peer", "Only these: jaxmha:NAME, torch-sdpa ...; repeatable.")
    ] = None,
    rounds: Rows = 7,
    threads: Annotated[int | None, option("--threads", "Of every library.", min=1)] = None,
    plot: PlotFile = None,
    force: Annotated[bool, option("--force", "Overwrite the plot.")] = False,
    save: Annotated[
        bool, option("--save", "Let jaxmha prefer what won, in such calls on this machine.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Time jaxmha's implementations and other installed libraries on your shapes, on this device.

    Every output is compared with float64 before it is timed. The share is that of the time that the
    device needs at least, by its own product of matrices and its own memory. The exit code is 1 if
    jaxmha computed nothing.
    """
    with one_message():
        options: dict[str, Any] = {
            "causal": causal,
            "packed": packed,
            "window": window,
            "bias": bias,
            "boolean": padding,
            "tf32": tf32,
        }
        sizes = _sizes(kind.value, T, S, layer=layer, packed=packed)
        unequal = h not in (None, H)
        _check(kind.value, layer, unequal, lengths or backward, options)
        if N % (K or N):
            raise ValueError(f"-N must be a multiple of -K, got {N} and {K}")
        _check_dtype(dtype, tf32, save)
        if plot is not None:
            check_picture(plot, force)
        if save:
            _check_save(layer, peer or ())
        called = _kind_of_case(kind.value, sizes, causal, lengths or padding)

        def case(platform: str) -> Case:
            return Case(
                "layer" if kind.value == "layer" or layer else "core",
                "backward" if backward else "forward",
                called,
                *(B, *sizes, N, K or N, H),
                dtype=dtype or ("float32" if platform == "cpu" else "bfloat16"),
                h=h or 0,
                **options,
            )

        with _progress() as say:
            found = bench.run(case, peer or (), rounds=rounds, threads=threads, say=say)
        try:  # files first, since a reader of the output may close it
            if save:
                _save(found, bench.order(found))
            if plot is not None:
                draw(found, plot)
        finally:
            print_json(found) if as_json else _print(found)
    ours = [row for row in found["rows"] if row["peer"].startswith("jaxmha")]
    raise typer.Exit(1 if ours and all("failed" in row for row in ours) else 0)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the current measurement: a terminal keeps one line, other
    streams get a line for each."""
    start = time.perf_counter()
    with err.status("measuring") as status:

        def say(text: str) -> None:
            line = f"{time.perf_counter() - start:4.0f} s  measuring {escape(text)}"
            status.update(line) if err.is_terminal else print_line(line, err)

        yield say


def _sizes(kind: str, T: int | None, S: int | None, *, layer: bool, packed: int) -> tuple[int, int]:
    """Returns T and S with defaults; ValueError if `kind` does not take them."""
    if kind == "decode":
        if S is None or S < 4:
            raise ValueError("decode needs -S, the keys of the cache, at least 4")
        if layer and T not in (None, 1):
            raise ValueError("--layer decodes one query: leave -T out")
        return T or 1, S
    if T is None:
        raise ValueError(f"{kind} needs -T, the number of queries")
    S = S or T
    if packed and (S != T or packed > T):
        raise ValueError(
            "--packed needs as many keys as queries, and at least one for each sequence"
        )
    return T, S


def _check(
    kind: str, layer: bool, unequal: bool, lengths_or_backward: bool, options: dict[str, Any]
) -> None:
    """Raises ValueError for options that `kind` or `layer` does not support."""
    if layer and kind != "decode":
        raise ValueError("--layer belongs to decode; `jaxmha bench layer` is the other")
    forbidden = {
        "decode": ("causal", "packed", "window", "bias", "boolean"),
        "layer": ("bias",),
        "attention": (),
    }[kind]
    given = [name for name in forbidden if options[name] not in (None, False, 0)]
    if kind == "decode" and lengths_or_backward:
        given.append("lengths or --backward")
    if given:
        name = given[0].replace("boolean", "padding")
        raise ValueError(f"{kind} is not timed with --{name}: leave it out")
    if unequal and (kind == "layer" or layer):
        raise ValueError("a layer is timed with values of -H features: leave -h out")


def _check_dtype(dtype: str | None, tf32: bool, save: bool) -> None:
    """Raises ValueError for a dtype that is not timed, or TF32 without float32."""
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype must be float32, bfloat16 or float16, got {dtype!r}")
    if tf32 and (dtype != "float32" or save):
        raise ValueError(
            "--tf32 needs --dtype float32, and no --save: calls are exact unless they say otherwise"
        )


def _check_save(layer: bool, peers: Sequence[str]) -> None:
    """Raises ValueError if no timing could be saved: of a layer, or without a peer of jaxmha."""
    if layer:
        raise ValueError("--save is for attention itself: leave out --layer or --save")
    ours = [f"{OURS}:{name}" for name in IMPLEMENTATIONS]
    if peers and not set(peers) & set(ours):
        raise ValueError(f"--save needs a --peer of jaxmha: one of {', '.join(ours)}")
    preferences.check()


def _kind_of_case(kind: str, sizes: tuple[int, int], causal: bool, padded: bool) -> CaseKind:
    """The kind of the timed case: the first that fits of decode, padded, cross, causal and plain."""
    if kind == "decode":
        return "decode"
    if padded:
        return "padded"
    if sizes[0] != sizes[1]:
        return "cross"
    return "causal" if causal else "plain"


def _save(found: dict[str, Any], order: list[str]) -> None:
    if not order:
        raise ValueError("--save: no implementation of jaxmha was timed by its name")
    direction = found["case"]["direction"]
    milliseconds = {
        row["peer"]: round(1e3 * row["seconds"], 4) for row in found["rows"] if "seconds" in row
    }
    entry = {"order": order, "measured": direction, "date": found["date"],
             "milliseconds": milliseconds, "versions": found["versions"]}  # fmt: skip
    where = preferences.save(found["call"], entry)
    print_line(f"saved: such calls prefer {order[0]} here ({escape(str(where))})", err)


def _print(found: dict[str, Any]) -> None:
    limits = found["limits"]
    print_line(
        f"{escape(found['name'])} on {escape(found['device'])}, {found['threads']} threads: a product "
        f"reaches {limits['tflops']:.3g} TFLOP/s, its memory {limits['gb_per_second']:.3g} GB/s"
    )
    table = Table()
    table.add_column("", no_wrap=True)
    for name in ("ms", "TFLOP/s", "GB/s", "share", "error"):
        table.add_column(name, justify="right")
    ordered = sorted(found["rows"], key=lambda row: row.get("seconds", float("inf")))
    for row in ordered:
        name = escape(row["peer"]) + " *" * row["chosen"]
        if "failed" in row:
            continue
        error = max(row["error"], row.get("gradient_error", 0.0))
        table.add_row(
            f"[green]{name}[/green]" if row["chosen"] else name,
            f"{1e3 * row['seconds']:.3g} ± {row['spread']:.0%}",
            f"{row['tflops']:.3g}",
            f"{row['gb_per_second']:.3g}",
            f"{row['share']:.0%}",
            f"{error:.1e}",
        )
    out.print(table)
    for row in ordered:
        if "failed" in row:
            print_line(f"{escape(row['peer'])}: {escape(row['failed'])}")
    if any(row["chosen"] for row in found["rows"]):
        print_line("*: what jaxmha chooses for such a call")
    if found["disturbed"]:
        print_line("[yellow]the machine was busy: times differ between rounds[/yellow]")
