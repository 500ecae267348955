"""`jaxmha describe`: the nodes of an attention layer given by sizes or by a checkpoint."""

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import typer
from rich.table import Table

from jaxmha import Semantics, checkpoint
from jaxmha.cli.console import Json, check_text, escape, one_message, out, print_json, put_text
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


def _option(name: str, about: str, **more: Any) -> Any:
    return typer.Option(name, help=about, **more)


def _size(name: str, about: str) -> Any:
    return typer.Option(name, help=about, min=1, show_default=False)


def describe_(
    file: Annotated[
        Path | None,
        typer.Argument(help="A checkpoint, instead of sizes.", show_default=False),
    ] = None,
    block: Annotated[
        str | None,
        _option("--block", "Its prefix, as `jaxmha inspect` lists it.  [default: first]"),
    ] = None,
    num_heads: Annotated[
        int | None, _size("--num-heads", "N; of a checkpoint only where it does not store it.")
    ] = None,
    features: Annotated[int | None, _size("--features", "Dq.")] = None,
    query_len: Annotated[int, _option("--query-len", "T.", min=1)] = 128,
    kv_len: Annotated[int | None, _size("--kv-len", "S.  [default: T]")] = None,
    batch: Annotated[int, _option("--batch", "B.", min=1)] = 1,
    num_kv_heads: Annotated[int | None, _size("--num-kv-heads", "K.  [default: N]")] = None,
    head_dim: Annotated[int | None, _size("--head-dim", "H.  [default: Dq / N]")] = None,
    value_head_dim: Annotated[int | None, _size("--value-head-dim", "h.  [default: H]")] = None,
    key_features: Annotated[int | None, _size("--key-features", "Dk.  [default: Dq]")] = None,
    value_features: Annotated[int | None, _size("--value-features", "Dv.  [default: Dk]")] = None,
    out_features: Annotated[int | None, _size("--out-features", "Do.  [default: Dq]")] = None,
    dtype: Annotated[
        str | None, _option("--dtype", "Of inputs and weights.  [default: float32, or the file's]")
    ] = None,
    causal: Annotated[bool, _option("--causal", "Query i attends keys j <= i.")] = False,
    mask: Annotated[str | None, _option("--mask", "Shape of a Boolean one beside: B,1,T,S")] = None,
    no_bias: Annotated[bool, _option("--no-bias", "Projections without biases.")] = False,
    bias_kv: Annotated[bool, _option("--bias-kv", "A learned extra key position.")] = False,
    zero_attn: Annotated[bool, _option("--zero-attn", "An extra key position of zeros.")] = False,
    dropout: Annotated[float, _option("--dropout", "Rate of dropout of the weights.")] = 0.0,
    soft_cap: Annotated[float | None, _option("--soft-cap", "Of the logits.")] = None,
    framework: Annotated[
        FrameworkName | None,
        _option("--framework", "Arrays as it stores them, and only its differences."),
    ] = None,
    svg: Annotated[Path | None, _option("--svg", "Draw the graph into this file.")] = None,
    force: Annotated[bool, _option("--force", "Overwrite the drawing.")] = False,
    as_json: Json = False,
) -> None:
    """Say what attention computes, node by node: formula, shape, cost, and what frameworks do
    otherwise."""
    with one_message():
        if svg is not None and svg.suffix != ".svg":
            raise ValueError(f"--svg: {svg} does not end in .svg, which is what is drawn")
        own = {
            "features": features,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "value_head_dim": value_head_dim,
            "key_features": key_features,
            "value_features": value_features,
            "out_features": out_features,
            "use_bias": False if no_bias else None,
            "use_bias_kv": True if bias_kv else None,
        }
        sizes = {name: size for name, size in own.items() if size is not None}
        params, name, others = None, "", 0
        semantics = Semantics(
            dropout_rate=dropout, logits_soft_cap=soft_cap, add_zero_attn=zero_attn
        )
        if file is not None:
            if sizes or zero_attn or soft_cap is not None:
                given = [*sizes, *["zero_attn"] * zero_attn, *["soft_cap"] * (soft_cap is not None)]
                options = ", ".join(f"--{one.replace('_', '-')}" for one in given)
                raise ValueError(
                    f"a checkpoint has its own sizes and behaviour: leave out {options}"
                )
            name, params, own_semantics, others = load_block.read(file, block, num_heads)
            semantics = dataclasses.replace(own_semantics, dropout_rate=dropout)
        elif block is not None:
            raise ValueError("--block names a block of a checkpoint: name the file too")
        elif num_heads is None or features is None:
            raise ValueError("give --num-heads and --features, or a checkpoint")
        else:
            sizes["num_heads"] = num_heads
        flow = describe(
            params,
            semantics,
            query_len=query_len,
            kv_len=kv_len,
            batch=batch,
            dtype=None if dtype is None else _dtype(dtype),
            is_causal=causal,
            mask=None if mask is None else _shape(mask),
            framework=framework.value if framework else None,
            **sizes,
        )
        if svg is not None:
            apart: list[Path] = []
            if file is not None:
                with checkpoint.open(file) as opened:
                    apart = list(opened.files)
            check_text(svg, force, apart)
            put_text(svg, flow.svg(), force, apart)
        if as_json:
            print_json({**flow.to_json(), **({"block": name} if file else {})})
            return
        _print(flow, f"{file}: {name or '(top)'}" if file else "multi-head attention")
        if others:
            out.print(f"one of {others + 1} blocks; --block names another", highlight=False)
        if svg is not None:
            out.print(f"drawn in {escape(str(svg))}", highlight=False)


def _dtype(name: str) -> Any:
    try:
        return jnp.dtype(name)
    except TypeError:
        raise ValueError(f"--dtype must be a dtype such as bfloat16, got {name!r}") from None


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--mask must be integers joined by commas, got {text!r}") from None


def _print(flow: DataFlow, title: str) -> None:
    letters = ", ".join(f"{letter}={size}" for letter, size in flow.sizes.items())
    out.print(escape(f"{title} in {flow.dtype}: {letters}"), highlight=False, soft_wrap=True)
    if flow.refused:
        why = flow.refused.split("; got params")[0]  # the line above shows the sizes
        shown = f"[yellow]{flow.framework} has no such layer:[/yellow] {escape(why)}"
        out.print(shown, highlight=False, soft_wrap=True)
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
    out.print(table)
    if flow.pairs is not None:
        full = flow.sizes["T"] * flow["logits"].shape[-1]
        out.print(f"causal: {flow.pairs} of {full} pairs of every head are needed", highlight=False)
    others = Table(title="where frameworks differ", title_justify="left")
    for column in ("node", "framework", "what it does"):
        others.add_column(column, overflow="fold")
    for node in flow.nodes:
        saying: dict[str, list[str]] = {}
        for one in node.differences:
            saying.setdefault(one.what, []).append(one.framework)
        for i, (what, names) in enumerate(saying.items(), 1):
            first, last = escape(node.name) if i == 1 else "", i == len(saying)
            others.add_row(first, ", ".join(names), escape(what), end_section=last)
    out.print(others)
