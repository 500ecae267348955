"""`jaxmha explain`: the implementation that a call would use, here or on another machine."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.table import Table

import jaxmha
from jaxmha.arrays import DTypeLike
from jaxmha.cli.console import escape, one_message, out, print_json
from jaxmha.cli.options import Json, option, parse_dtype, parse_integers
from jaxmha.explain import Explanation

EXAMPLES = (
    "Examples:\n\n  jaxmha explain -T 8192 -N 16 -H 128 --causal --platform h200\n\n"
    "  jaxmha explain -B 8 -T 1 -S 4096 -N 32 -K 8 -H 128 --lengths --platform gpu --json\n\n"
    "  jaxmha explain -T 512 -N 8 -H 64 --dtype float32 --bias 1,8,512,512"
)


Implementations = Annotated[
    list[str] | None, option("--implementation", "Candidates in order; may be repeated.")
]
Platform = Annotated[
    str | None, option("--platform", "cpu, gpu, tpu, h200, a100 ...  [default: this machine]")
]
MaskShape = Annotated[str | None, option("--mask", "Shape of a dense mask: B,1,T,S")]


def command(
    T: Annotated[int, option("-T", "Queries.", min=1)],
    N: Annotated[int, option("-N", "Query heads.", min=1)],
    H: Annotated[int, option("-H", "Features of a query or key head.", min=1)],
    B: Annotated[int, option("-B", "Batch.", min=1)] = 1,
    S: Annotated[int | None, option("-S", "Keys.  [default: T]", min=1)] = None,
    K: Annotated[int | None, option("-K", "Key/value heads.  [default: N]", min=1)] = None,
    h: Annotated[int | None, option("-h", "Features of a value head.  [default: H]", min=1)] = None,
    dtype: Annotated[str, option("--dtype", "Of queries, keys and values.")] = "bfloat16",
    platform: Platform = None,
    implementation: Implementations = None,
    causal: Annotated[bool, option("--causal", "Causal mask, aligned top-left.")] = False,
    lengths: Annotated[bool, option("--lengths", "Lengths of the keys, (B,).")] = False,
    query_lengths: Annotated[bool, option("--query-lengths", "Lengths of the queries.")] = False,
    padding: Annotated[bool, option("--padding", "Any pattern of keys, (B, S).")] = False,
    segments: Annotated[bool, option("--segments", "Ids of packed sequences.")] = False,
    window: Annotated[str | None, option("--window", "left,right")] = None,
    bias: Annotated[str | None, option("--bias", "Shape of a bias: 1,N,T,S")] = None,
    mask: MaskShape = None,
    soft_cap: Annotated[float | None, option("--soft-cap", "Soft cap of the logits.")] = None,
    dropout: Annotated[float, option("--dropout", "Dropout rate.")] = 0.0,
    weights: Annotated[bool, option("--weights", "The weights are returned.")] = False,
    lse: Annotated[bool, option("--lse", "The log-sum-exp is returned.")] = False,
    as_json: Json = False,
) -> None:
    """Print the implementation that attention would use, and why each one before it is rejected.

    No device is needed. The exit code is 1 if no implementation can compute the call.
    """
    with one_message():
        S, K, h = S or T, K or N, h or H
        kind = parse_dtype(dtype)
        options: dict[str, Any] = {
            "is_causal": causal,
            "query_seq_lengths": _array(B, dtype=jnp.int32) if query_lengths else None,
            "key_value_seq_lengths": _array(B, dtype=jnp.int32) if lengths else None,
            "segment_ids": _segments(B, T, S) if segments else None,
            "local_window_size": None if window is None else _window(window),
            "logits_soft_cap": soft_cap,
            "dropout_rate": dropout,
            "dropout_key": _array(2, dtype=jnp.uint32) if dropout else None,
            "return_weights": weights,
            "return_lse": lse,
            "bias": None if bias is None else _array(*parse_integers(bias, "--bias"), dtype=kind),
            "mask": _mask(mask, (B, S) if padding else None),
            "implementation": tuple(implementation) if implementation else None,
        }
        with jax.enable_x64(kind == jnp.float64):
            found = jaxmha.explain(
                *(
                    _array(*shape, dtype=kind)
                    for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, h))
                ),
                platform=platform,
                **{name: x for name, x in options.items() if x is not None},
            )
        _print(found, f"attention of ({B}, {T}, {N}, {H}) in {kind.name}", as_json)
    raise typer.Exit(0 if found.chosen else 1)


def _array(*shape: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _segments(B: int, *lengths: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(_array(B, length, dtype=jnp.int32) for length in lengths)


def _window(text: str) -> int | tuple[int, ...]:
    both = parse_integers(text, "--window")
    return both if len(both) > 1 else both[0]


def _mask(
    shape: str | None, padding: tuple[int, int] | None
) -> jaxmha.Mask | jax.ShapeDtypeStruct | None:
    """Makes a dense mask, a padding mask of keys, or both, from shapes."""
    dense = None if shape is None else _array(*parse_integers(shape, "--mask"), dtype=jnp.bool_)
    if padding is None:
        return dense
    # Only shapes and dtypes are read.
    keys = jaxmha.Mask.padding(key_value=_array(*padding, dtype=jnp.bool_))  # type: ignore[arg-type]
    return keys if dense is None else keys & jaxmha.Mask.dense(dense)  # type: ignore[arg-type]


def _print(found: Explanation, title: str, as_json: bool) -> None:
    if as_json:
        reasons = dict(found.reasons)
        print_json(
            {
                "platform": found.platform,
                "chosen": found.chosen,
                "reasons": reasons,
                "saved": found.saved,
                "source": found.source,
            }
        )
        return
    out.print(f"{title} on {found.platform}", highlight=False, markup=False, soft_wrap=True)
    table = Table()
    table.add_column("implementation")
    table.add_column("", overflow="fold")
    for name, what in found.rows():
        text = escape(what)
        table.add_row(name, f"[green]{text}[/green]" if name == found.chosen else text)
    out.print(table)
