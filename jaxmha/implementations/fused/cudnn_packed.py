"""cuDNN's fused attention of packed sequences: each batch row holds several, one after another.

JAX's own function moves empty sequences to the end, in some ten small kernels, and computes the
offsets of keys with the number of query heads, so that grouped queries would read wrong keys. This
module binds JAX's primitives directly, with lengths of 0 for empty sequences.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32

from jaxmha.implementations import partitioned
from jaxmha.implementations.fused.adapter import fill
from jaxmha.implementations.fused.cudnn_kernel import EVEN, Settings, folding

# All operands of JAX's forward primitive, which are the first of its backward primitive, and the
# static parameters that both have. `unknown` declines a release whose forward primitive has others.
OPERANDS = ["query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets",
            "page_table_k", "page_table_v"]  # fmt: skip
STATIC = {"scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout",
          "sliding_window_length"}  # fmt: skip

# How `partitioned` splits arrays over devices, by axis: batch rows `b`, query heads `n`, key/value
# heads `k`, `.` not at all. QUERY is for queries, output, log-sum-exp (`B M1 N T`) and the
# cotangent of the output; KEY is for keys and values.
QUERY, KEY = "b.n.", "b.k."

Operands: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
Saved: TypeAlias = tuple[Operands, jax.Array, jax.Array, Callable[..., Any]]


def unknown() -> str | None:
    """The reason why this release of JAX cannot be used here: its forward primitive has other
    operands or static parameters. None: it can."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    found = inspect.signature(private._dot_product_attention_fwd_abstract).parameters
    names = [name for name, x in found.items() if x.kind is not x.KEYWORD_ONLY]
    static = {name for name, x in found.items() if x.kind is x.KEYWORD_ONLY}
    if names != OPERANDS or static != STATIC | {"is_training"}:
        return "cuDNN's packed sequences are called in another way by this release of JAX"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def out(
    settings: Settings,
    query: Float[jax.Array, "B T N H"],
    key: Float[jax.Array, "B T K H"],
    value: Float[jax.Array, "B T K H"],
    ends: Int32[jax.Array, "B M"],
) -> Float[jax.Array, "B T N H"]:
    """The output of attention within packed sequences, causal in each if `settings.causal` is set.

    Sequence m of a batch row has the positions before `ends[:, m]` that no earlier sequence has; an
    empty one repeats the end before it. Positions after the last sequence form a further sequence.
    """
    found: jax.Array = _forward(settings, False, query, key, value, ends)[0]
    return found


def _save(settings: Settings, *operands: jax.Array) -> tuple[jax.Array, Saved]:
    *heads, ends = operands
    T = heads[0].shape[1]
    rows = -(-T // EVEN) * EVEN
    if rows > T:  # the positions that pad T form a further sequence, apart from all others
        ends = _with_last(ends, T)
    padded, unpad = jax.vjp(lambda *x: tuple(fill(y, 1, rows) for y in x), *heads)
    found, lse = _forward(settings, True, *padded, ends)
    return found[:, :T], ((*padded, ends), found, lse, unpad)


def _pull(settings: Settings, saved: Saved, d_out: jax.Array) -> tuple[Any, ...]:
    operands, found, lse, unpad = saved
    d_out = fill(d_out, 1, found.shape[1])
    grads = _backward(settings, *operands, lse, found, d_out)
    return *unpad(grads), None


out.defvjp(_save, _pull)


def _with_last(ends: Int32[jax.Array, "B M"], T: int) -> Int32[jax.Array, "B M1"]:
    """Appends the end T, so that the positions after the last sequence form a further one."""
    return jnp.pad(ends, ((0, 0), (0, 1)), constant_values=np.int32(T))


def _operands(
    query: jax.Array, key: jax.Array, value: jax.Array, ends: jax.Array
) -> tuple[jax.Array, ...]:
    """The operands of the primitives, in the order of `OPERANDS`, from the operands of `out`.

    The offset of a sequence is the number of scalars before it in the flat array of the batch. The
    primitive reads one offset more than there are sequences, the end of the batch, and needs an
    array with one entry more per batch row. Lengths get as many entries, though the primitive does
    not read the last ones, so that XLA computes all of these arrays in one kernel.
    """
    B, T = query.shape[:2]
    rows = np.int32(T) * jnp.arange(B, dtype=np.int32)[:, None]
    ends = _with_last(ends, T)
    first = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))

    def listed(x: Int32[jax.Array, "B M"], last: int) -> Int32[jax.Array, "B M1"]:
        return jnp.pad(x.reshape(-1), (0, B), constant_values=np.int32(last)).reshape(B, -1)

    strides = [x.shape[2] * x.shape[3] for x in (query, key)]
    offsets = [listed((first + rows) * stride, B * T * stride) for stride in strides]
    sizes = listed(ends - first, 0)
    unused = jnp.zeros(0, query.dtype)
    return query, key, value, unused, sizes, sizes, *offsets, unused, unused


def static(settings: Settings) -> dict[str, Any]:
    """The static parameters of both primitives for arrays in `BTNH` with lengths, except
    `is_training`, which only the forward primitive has."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    kinds = private.MaskType
    return {
        "scale": settings.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": kinds.PADDING_CAUSAL if settings.causal else kinds.PADDING,
        "layout": private.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }


def _forward(settings: Settings, lse: bool, *operands: jax.Array) -> Any:
    """Output from query, key, value and ends, and the log-sum-exp that `_backward` reads (None if
    `lse` is False): that of cuDNN, with a batch axis in front, `B M1 N T`, where M1 = M + 1."""

    def call(query: Any, key: Any, value: Any, ends: Any) -> Any:
        from jax._src.cudnn import fused_attention_stablehlo as private

        primitive: Any = private._dot_product_attention_fwd_p
        found = primitive.bind(
            *_operands(query, key, value, ends), **static(settings), is_training=lse
        )
        if not lse:
            return found[0], None
        # The log-sum-exp of cuDNN has one axis for all sequences of all batch rows, but `folding`
        # needs a batch axis.
        B = query.shape[0]
        return found[0], found[1].reshape(B, -1, *found[1].shape[1:])

    # Each device computes its own offsets: they count the positions of its own batch rows.
    letters = QUERY, KEY, KEY, "b."
    return partitioned.run(
        folding(call), operands, letters, lambda found: (QUERY, None if found[1] is None else QUERY)
    )


def _backward(settings: Settings, *operands: jax.Array) -> Any:
    """Gradients of query, key and value from query, key, value, ends, the log-sum-exp of
    `_forward`, output and the cotangent of the output."""

    def call(query: Any, key: Any, value: Any, ends: Any, lse: Any, out: Any, d_out: Any) -> Any:
        from jax._src.cudnn import fused_attention_stablehlo as private

        saved = lse.reshape(-1, *lse.shape[2:]), out, d_out
        primitive: Any = private._dot_product_attention_bwd_p
        found = primitive.bind(*_operands(query, key, value, ends), *saved, **static(settings))
        return tuple(found[:3])

    letters = QUERY, KEY, KEY, "b.", QUERY, QUERY, QUERY
    return partitioned.run(folding(call), operands, letters, lambda _: (QUERY, KEY, KEY))
