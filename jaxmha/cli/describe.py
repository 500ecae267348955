"""`jaxmha describe`: the nodes of an attention layer given by sizes or by a checkpoint."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.table import Table
from typer.models import OptionInfo

from jaxmha import MHAParams, Semantics
from jaxmha.cli.console import (
    check_text,
    escape,
    one_message,
    out,
    print_json,
    print_line,
    put_text,
)
from jaxmha.cli.options import Block, Json, option, parse_dtype, parse_integers
from jaxmha.cli.plan import files_of
from jaxmha.converters.verify import load_block
from jaxmha.introspect.framework_differences import FRAMEWORKS
from jaxmha.introspect.graph import DataFlow
from jaxmha.introspect.graph_nodes import describe
from jaxmha.introspect.graph_svg import memory, short

EXAMPLES = (
    "Examples:\n\n  jaxmha describe --num-heads 8 --features 512 --query-len 10\n\n"
    "  jaxmha describe --num-heads 8 --features 512 --query-len 10 --framework torch --svg mha.svg\n\n"
    "  jaxmha describe --num-heads 32 --num-kv-heads 8 --features 4096 --query-len 1 "
    "--kv-len 8192 --dtype bfloat16 --no-bias\n\n"
    "  jaxmha describe model.safetensors --block encoder.layer.3.attention --query-len 128"
)
FrameworkName = Enum("FrameworkName", {x: x for x in FRAMEWORKS}, type=str)  # type: ignore[misc]
Framework = Annotated[
    FrameworkName | None,
    option("--framework", "Show arrays as this framework stores them, and only its differences."),
]
Dtype = Annotated[
    str | None,
    option("--dtype", "Dtype of inputs and weights.  [default: float32, or that of the file]"),
]


def _size(names: str, about: str) -> OptionInfo:
    return option(names, about, min=1, show_default=False)


File = Annotated[
    Path | None, typer.Argument(help="A checkpoint, instead of sizes.", show_default=False)
]
NumHeads = Annotated[
    int | None, _size("--num-heads", "N; with a checkpoint only if it does not store it.")
]


def command(
    file: File = None,
    block: Block = None,
    num_heads: NumHeads = None,
    features: Annotated[int | None, _size("--features", "Dq.")] = None,
    query_len: Annotated[int, option("--query-len", "T.", min=1)] = 128,
    kv_len: Annotated[int | None, _size("--kv-len", "S.  [default: T]")] = None,
    batch: Annotated[int, option("--batch", "B.", min=1)] = 1,
    num_kv_heads: Annotated[int | None, _size("--num-kv-heads", "K.  [default: N]")] = None,
    head_dim: Annotated[int | None, _size("--head-dim", "H.  [default: Dq / N]")] = None,
    value_head_dim: Annotated[int | None, _size("--value-head-dim", "h.  [default: H]")] = None,
    key_features: Annotated[int | None, _size("--key-features", "Dk.  [default: Dq]")] = None,
    value_features: Annotated[int | None, _size("--value-features", "Dv.  [default: Dk]")] = None,
    out_features: Annotated[int | None, _size("--out-features", "Do.  [default: Dq]")] = None,
    dtype: Dtype = None,
    causal: Annotated[bool, option("--causal", "Query i attends keys j <= i.")] = False,
    mask: Annotated[str | None, option("--mask", "Shape of a Boolean mask: B,1,T,S")] = None,
    no_bias: Annotated[bool, option("--no-bias", "Projections without biases.")] = False,
    bias_kv: Annotated[bool, option("--bias-kv", "A learned extra key position.")] = False,
    zero_attn: Annotated[bool, option("--zero-attn", "An extra key position of zeros.")] = False,
    dropout: Annotated[float, option("--dropout", "Dropout rate of the weights.")] = 0.0,
    soft_cap: Annotated[float | None, option("--soft-cap", "Soft cap of the logits.")] = None,
    framework: Framework = None,
    svg: Annotated[Path | None, option("--svg", "Draw the graph into this file.")] = None,
    force: Annotated[bool, option("--force", "Overwrite the drawing.")] = False,
    as_json: Json = False,
) -> None:
    """Print every step of attention: formula, shape, cost, and how frameworks differ.

    A line names the positions and the mask of the model, which it applies around these steps.
    """
    with one_message():
        if svg is not None and svg.suffix != ".svg":
            raise ValueError(f"--svg: the output must end in .svg, got {svg}")
        # fmt: off
        sizes = _given(
            num_heads=num_heads, features=features, num_kv_heads=num_kv_heads, head_dim=head_dim,
            value_head_dim=value_head_dim, key_features=key_features, value_features=value_features,
            out_features=out_features, use_bias=False if no_bias else None,
            use_bias_kv=bias_kv or None,
        )
        # fmt: on
        semantics = _semantics(dropout, soft_cap, zero_attn)
        layer = _layer(file, block, sizes, semantics, causal)
        flow = describe(
            layer.params,
            layer.semantics,
            query_len=query_len,
            kv_len=kv_len,
            batch=batch,
            dtype=None if dtype is None else parse_dtype(dtype),
            is_causal=causal,
            mask=None if mask is None else parse_integers(mask, "--mask"),
            framework=framework.value if framework else None,
            **layer.sizes,
        )
        if svg is not None:
            _draw(flow, svg, force, file)
        if as_json:
            own = {"block": layer.name, "not_applied": layer.not_applied}
            print_json({**flow.to_json(), **(own if file else {})})
        else:
            _print(flow, f"{file}: {layer.name or '(top)'}" if file else "multi-head attention")
            _print_end(layer, svg)


class _Layer(NamedTuple):
    """The layer to describe: the parameters of a block, or the sizes of a layer without a file."""

    name: str
    params: MHAParams | None
    semantics: Semantics
    sizes: Mapping[str, int]
    others: int  # further blocks in the checkpoint
    not_applied: str = ""  # positions and mask of the model, which no node has


def _semantics(dropout: float, soft_cap: float | None, zero_attn: bool) -> Semantics:
    return Semantics(dropout_rate=dropout, logits_soft_cap=soft_cap, add_zero_attn=zero_attn)


def _given(**sizes: int | None) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size is not None}


def _layer(
    file: Path | None,
    block: str | None,
    sizes: Mapping[str, int],
    semantics: Semantics,
    causal: bool,
) -> _Layer:
    """Reads the block of a checkpoint, or takes the sizes.

    Raises:
        ValueError: options contradict each other or are missing.
    """
    if file is None:
        if block is not None:
            raise ValueError("--block names a block of a checkpoint: name the file too")
        if not {"num_heads", "features"} <= sizes.keys():
            raise ValueError("give --num-heads and --features, or a checkpoint")
        return _Layer("", None, semantics, sizes, 0)
    given = [name for name in sizes if name != "num_heads"]
    given += ["zero_attn"] * semantics.add_zero_attn
    given += ["soft_cap"] * (semantics.logits_soft_cap is not None)
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"a checkpoint has its own sizes and behaviour: leave out {options}")
    found = load_block.read(file, block, sizes.get("num_heads"))
    own = dataclasses.replace(found.semantics, dropout_rate=semantics.dropout_rate)
    not_applied = found.not_applied(mask="causal" if causal else "")
    return _Layer(found.name, found.params, own, {}, found.others, not_applied)


def _print(flow: DataFlow, title: str) -> None:
    letters = ", ".join(f"{letter}={size}" for letter, size in flow.sizes.items())
    print_line(escape(f"{title} in {flow.dtype}: {letters}"))
    if flow.refused:
        why = flow.refused.split("; got params")[0]  # the line above shows the sizes
        print_line(f"[yellow]{flow.framework} has no such layer:[/yellow] {escape(why)}")
    out.print(_nodes(flow))
    if flow.pairs is not None:
        full = flow.sizes["T"] * flow["logits"].shape[-1]
        print_line(f"causal: {flow.pairs} of {full} pairs of every head are needed")
    out.print(_differences(flow))


def _draw(flow: DataFlow, svg: Path, force: bool, file: Path | None) -> None:
    sources = [] if file is None else files_of(file)
    check_text(svg, force, sources)
    put_text(svg, flow.svg(), force, sources)


def _print_end(layer: _Layer, svg: Path | None) -> None:
    if layer.not_applied:
        print_line(f"not in this table: {escape(layer.not_applied)}")
    if layer.others:
        print_line(f"one of {layer.others + 1} blocks; --block names another")
    if svg is not None:
        print_line(f"drawn in {escape(str(svg))}")


def _nodes(flow: DataFlow) -> Table:
    table = Table()
    for column in ("node", "formula", "shape"):
        table.add_column(column, overflow="fold")
    for column in ("FLOPs", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for node in flow.nodes:
        formula = escape(node.formula)
        for name, axes, size in node.parameters:
            numbers = " × ".join(map(str, size))
            formula += f"\n[dim]{escape(name)}: {escape(axes)} = {numbers}[/dim]"
        shape = f"{node.axes}\n= {' × '.join(map(str, node.shape))}\n[dim]{node.dtype}[/dim]"
        cost = [short(node.flops) if node.flops else "", memory(node.bytes) if node.bytes else ""]
        table.add_row(escape(node.name), formula, shape, *cost)
    table.add_section()
    fused = (
        f"{memory(flow.bytes_fused)} if attention is fused (logits and weights are never written)"
    )
    table.add_row("all", fused, "", short(flow.flops), memory(flow.bytes))
    return table


def _differences(flow: DataFlow) -> Table:
    table = Table(title="where frameworks differ", title_justify="left")
    for column in ("node", "framework", "what it does"):
        table.add_column(column, overflow="fold")
    for node in flow.nodes:
        frameworks: dict[str, list[str]] = {}  # difference -> frameworks
        for one in node.differences:
            frameworks.setdefault(one.what, []).append(one.framework)
        for i, (what, names) in enumerate(frameworks.items(), 1):
            first, last = escape(node.name) if i == 1 else "", i == len(frameworks)
            table.add_row(first, ", ".join(names), escape(what), end_section=last)
    return table
