"""`jaxmha explain`: the implementation that a call would use, here or on another machine."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.table import Table

import jaxmha
from jaxmha.cli.console import escape, one_message, out, print_json

EXAMPLES = (
    "Examples:\n\n  jaxmha explain -T 8192 -N 16 -H 128 --causal --platform h200\n\n"
    "  jaxmha explain -B 8 -T 1 -S 4096 -N 32 -K 8 -H 128 --lengths --platform gpu --json\n\n"
    "  jaxmha explain -T 512 -N 8 -H 64 --dtype float32 --bias 1,8,512,512"
)


def _option(letters: str, about: str, **more: Any) -> Any:
    return typer.Option(*letters.split(), help=about, **more)


def _sizes(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} must be integers joined by commas, got {text!r}") from None


def explain(
    T: Annotated[int, _option("-T", "Queries.", min=1)],
    N: Annotated[int, _option("-N", "Query heads.", min=1)],
    H: Annotated[int, _option("-H", "Features of a query or key head.", min=1)],
    B: Annotated[int, _option("-B", "Batch.", min=1)] = 1,
    S: Annotated[int | None, _option("-S", "Keys.  [default: T]", min=1)] = None,
    K: Annotated[int | None, _option("-K", "Key/value heads.  [default: N]", min=1)] = None,
    h: Annotated[
        int | None, _option("-h", "Features of a value head.  [default: H]", min=1)
    ] = None,
    dtype: Annotated[str, _option("--dtype", "Of queries, keys and values.")] = "bfloat16",
    platform: Annotated[
        str | None, _option("--platform", "cpu, gpu, tpu, h200, a100 ...; default: what is here.")
    ] = None,
    implementation: Annotated[
        list[str] | None, _option("--implementation", "Candidates in order; may be repeated.")
    ] = None,
    causal: Annotated[bool, _option("--causal", "Aligned top-left.")] = False,
    lengths: Annotated[bool, _option("--lengths", "Lengths of the keys, (B,).")] = False,
    query_lengths: Annotated[bool, _option("--query-lengths", "Of the queries.")] = False,
    padding: Annotated[bool, _option("--padding", "Any pattern of keys, (B, S).")] = False,
    segments: Annotated[bool, _option("--segments", "Ids of packed sequences.")] = False,
    window: Annotated[str | None, _option("--window", "left,right")] = None,
    bias: Annotated[str | None, _option("--bias", "Its shape: 1,N,T,S")] = None,
    mask: Annotated[str | None, _option("--mask", "Shape of a dense one: B,1,T,S")] = None,
    soft_cap: Annotated[float | None, _option("--soft-cap", "Of the logits.")] = None,
    dropout: Annotated[float, _option("--dropout", "Its rate.")] = 0.0,
    weights: Annotated[bool, _option("--weights", "The weights are returned.")] = False,
    lse: Annotated[bool, _option("--lse", "The log-sum-exp is returned.")] = False,
    as_json: Annotated[bool, _option("--json", "Print JSON for scripts.")] = False,
) -> None:
    """Say which implementation attention would use, and why no earlier one. Needs no device.

    Exit code 1 if none can compute it.
    """
    with one_message():
        S, K, h = S or T, K or N, h or H
        try:
            kind = jnp.dtype(dtype)
        except TypeError:
            raise ValueError(f"--dtype must be a dtype such as bfloat16, got {dtype!r}") from None

        def array(*shape: int, dtype: Any = kind) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]

        def counts() -> Any:
            return array(B, dtype=jnp.int32)

        options: dict[str, Any] = {
            "is_causal": causal,
            "query_seq_lengths": counts() if query_lengths else None,
            "key_value_seq_lengths": counts() if lengths else None,
            "segment_ids": tuple(array(B, n, dtype=jnp.int32) for n in (T, S))
            if segments
            else None,
            "logits_soft_cap": soft_cap,
            "dropout_rate": dropout,
            "dropout_key": array(2, dtype=jnp.uint32) if dropout else None,
            "return_weights": weights,
            "return_lse": lse,
        }
        if window is not None:
            sides = _sizes(window, "--window")
            options["local_window_size"] = sides if len(sides) > 1 else sides[0]
        shape = None if mask is None else _sizes(mask, "--mask")
        allowed: Any = None if shape is None else array(*shape, dtype=jnp.bool_)
        if padding:
            there = jaxmha.Mask.padding(key_value=array(B, S, dtype=jnp.bool_))
            allowed = there if allowed is None else there & jaxmha.Mask.dense(allowed)
        with jax.enable_x64(kind == jnp.float64):
            found = jaxmha.explain(
                array(B, T, N, H),
                array(B, S, K, H),
                array(B, S, K, h),
                None if bias is None else array(*_sizes(bias, "--bias")),
                allowed,
                platform=platform,
                implementation=tuple(implementation) if implementation else None,
                **{name: x for name, x in options.items() if x is not None},
            )
        if as_json:
            print_json(
                {"platform": found.platform, "chosen": found.chosen, "reasons": dict(found.reasons)}
            )
        else:
            title = f"attention of ({B}, {T}, {N}, {H}) in {kind.name} on {found.platform}"
            out.print(title, highlight=False, markup=False, soft_wrap=True)
            table = Table()
            table.add_column("implementation")
            table.add_column("", overflow="fold")
            for name, what in found.rows():
                shown = escape(what)
                table.add_row(name, f"[green]{shown}[/green]" if what == "chosen" else shown)
            out.print(table)
    raise typer.Exit(0 if found.chosen else 1)
