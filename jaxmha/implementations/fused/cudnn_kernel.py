"""One call of cuDNN's fused attention and its gradient, through JAX's private functions.

`jax.nn.dot_product_attention(implementation="cudnn")` calls the same two functions. Unlike it, this
module gives the log-sum-exp in float32, gradients at odd T and S, and any `jax.vmap` (JAX 0.10
supports only one over all operands). The calls fit the signatures of JAX 0.10 to 0.12.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmha.implementations import partitioned
from jaxmha.implementations.fused.adapter import Others, fill

# To compute gradients with a bias, T and S are padded to a multiple of this: at other sizes cuDNN's
# backward pass is wrong or missing (NaN at 64 modulo 128).
BIAS_MULTIPLE = 128
# For gradients without a bias, T and S are padded to a multiple of EVEN: cuDNN has no gradient for
# T = S = 1, and `jax.nn` rejects gradients at all odd T or S. For any gradient where T or S is not
# a multiple of SAFE, lengths are given: without them some releases of cuDNN return NaN.
EVEN, SAFE = 2, 64
# Bias of an excluded pair. Other entries are at least -2**40 (`cudnn.LOWEST`), so that its weight
# is 0 in any row with another pair.
EXCLUDED = -(2.0**41)
# If the largest bias of a row has at least this absolute value, it is subtracted from the row: the
# gradient computes weights from the log-sum-exp, which at such a size would lose digits of the log
# of the row sum.
FAR = 2.0**12


class Settings(NamedTuple):
    """Static configuration of one call.

    Attributes:
      scale: the factor of the products of queries and keys.
      causal: True if row i attends keys up to i only.
      left: the number of keys before i that row i attends; None: all. Only set if `causal` is.
      bias_gradient: True if there is a bias that needs a gradient, unlike one that only excludes
        pairs.
      layout: the axes of queries, keys, values and output: "BTNH", or "BNTH" in calls that are not
        differentiated.
    """

    scale: float
    causal: bool
    left: int | None
    bias_gradient: bool = False
    layout: str = "BTNH"


Operands: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, Others]
Grads: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
Saved: TypeAlias = tuple[Operands, jax.Array, jax.Array, Callable[..., Grads]]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def out(
    settings: Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    lengths: Others,
) -> jax.Array:
    """The output, for arrays in `settings.layout`. T and S are padded only for gradients."""
    found: jax.Array = _forward(settings, False, query, key, value, bias, lengths)[0]
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def out_and_lse(
    settings: Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    lengths: Others,
) -> tuple[jax.Array, Float[jax.Array, "B N T"]]:
    """Output and log-sum-exp, for arrays in `settings.layout`. Gradients ignore the cotangent of
    the log-sum-exp, whose part `adapter.out_and_lse` adds."""
    found, lse = _forward(settings, True, query, key, value, bias, lengths)
    return found, lse


def _save(
    settings: Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    lengths: Others,
) -> tuple[tuple[jax.Array, jax.Array], Saved]:
    (B, T), S = query.shape[:2], key.shape[1]
    multiple = EVEN if bias is None else BIAS_MULTIPLE
    rows, columns = (-(-size // multiple) * multiple for size in (T, S))
    if settings.left is not None:  # pads keys: cuDNN rejects windows with more queries than keys
        columns = max(columns, rows)

    def padded(
        query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        if bias is not None:
            missing = ((0, 0), (0, 0), (0, rows - T), (0, columns - S))
            bias = jnp.pad(bias, missing, constant_values=EXCLUDED)
        return fill(query, 1, rows), fill(key, 1, columns), fill(value, 1, columns), bias

    heads, unpad = jax.vjp(padded, query, key, value, bias)
    if lengths is None and (T % SAFE or S % SAFE):
        lengths = jnp.full(B, T, np.int32), jnp.full(B, S, np.int32)
    added = heads[3]
    if added is None or not settings.bias_gradient:
        found, lse = _forward(settings, True, *heads, lengths)
        return (found[:, :T], lse[:, :, :T]), ((*heads, lengths), found, lse, unpad)
    shift = _shift(settings, added, lengths)
    lower = (added.astype(np.float32) - shift).astype(added.dtype)
    found, lse = _forward(settings, True, *heads[:3], lower, lengths)
    saved = (*heads[:3], lower, lengths), found, lse, unpad
    return (found[:, :T], (lse + shift[..., 0])[:, :, :T]), saved


def _shift(
    settings: Settings, bias: Float[jax.Array, "b n T S"], lengths: Others
) -> Float[jax.Array, "b n T 1"]:
    """The largest bias of each row within bounds and key lengths if its absolute value is at least
    FAR, else 0. Subtracting it from the row does not change the softmax. If batch rows share the
    bias (b = 1), they share the shift, within the largest key length."""
    T, S = bias.shape[2:]
    i, j = jnp.arange(T).reshape(1, 1, T, 1), jnp.arange(S).reshape(1, 1, 1, S)
    within = j >= 0
    if settings.causal:
        within = j <= i
        within &= j >= i - (T if settings.left is None else settings.left)
    if lengths is not None:
        keys = lengths[1] if len(bias) > 1 else lengths[1].max(keepdims=True)
        within = within & (j < keys.reshape(-1, 1, 1, 1))
    most = jnp.where(within, bias.astype(np.float32), -jnp.inf).max(3, keepdims=True)
    return jnp.where(jnp.isfinite(most) & (jnp.abs(most) >= FAR), most, 0)


def _pull(settings: Settings, saved: Saved, d_out: jax.Array) -> tuple[Any, ...]:
    operands, found, lse, unpad = saved
    d_out = fill(d_out, 1, found.shape[1])
    grads = _backward(settings, *operands, found, lse, d_out)
    if operands[3] is not None and grads[3] is None:
        grads = (*grads[:3], jnp.zeros_like(operands[3]))
    return *unpad(grads), None


def _save_out(settings: Settings, *operands: Any) -> tuple[jax.Array, Saved]:
    (found, _), saved = _save(settings, *operands)
    return found, saved


out.defvjp(_save_out, _pull)
out_and_lse.defvjp(_save, lambda settings, saved, grads: _pull(settings, saved, grads[0]))


def _forward(settings: Settings, lse: bool, *operands: Any) -> Any:
    """Output and log-sum-exp (None if `lse` is False) from query, key, value, bias and lengths."""

    def call(query: Any, key: Any, value: Any, bias: Any, lengths: Others) -> Any:
        from jax._src.cudnn import fused_attention_stablehlo as private

        found = private.dot_product_attention(
            query,
            key,
            value,
            bias,
            None,
            *(lengths or (None, None)),
            scale=settings.scale,
            mask_type=_mask_type(settings, lengths),
            qkv_layout=settings.layout,
            sliding_window_length=None if settings.left is None else settings.left + 1,
            return_residual=lse,
        )
        return found if lse else (found, None)

    letters = _letters(settings, *operands[3:])
    results = letters[0], "bn." if lse else None
    return partitioned.run(folding(call), operands, letters, lambda _: results)


def _backward(settings: Settings, *operands: Any) -> Grads:
    """Gradients of query, key, value and bias (None without `bias_gradient`) from query, key,
    value, bias, lengths, output, log-sum-exp and the cotangent of the output."""

    def call(
        query: Any, key: Any, value: Any, bias: Any, lengths: Others, out: Any, lse: Any, d_out: Any
    ) -> Any:
        from jax._src.cudnn import fused_attention_stablehlo as private

        rule: Any = private._dot_product_attention_bwd_rule
        unused = jnp.zeros(0, query.dtype)
        static = {
            "scale": settings.scale,
            "seed": 42,
            "dropout_rate": 0.0,
            "variadic_args": (bias is not None, settings.bias_gradient),
            "mask_type": _mask_type(settings, lengths),
            "layout": private._normalize_layout(settings.layout).value,
            "sliding_window_length": None if settings.left is None else settings.left + 1,
        }
        # The last two parameters of JAX's rule are residuals and cotangent, the others are static.
        names = [*inspect.signature(rule).parameters][:-2]
        score_mod = ((),) * ("score_mod" in names)  # JAX 0.12 reads residuals of a score_mod: none
        given = (unused if bias is None else bias, *(lengths or (unused, unused)))
        saved = (query, key, value, *given, *(unused,) * 4, *score_mod, lse, out)
        found = rule(*(static.get(name) for name in names), saved, d_out)
        return (*found[:3], found[3] if settings.bias_gradient else None)

    query, key, _, bias, lengths = _letters(settings, *operands[3:5])
    letters = query, key, key, bias, lengths, query, "bn.", query
    results = query, key, key, bias if settings.bias_gradient else None
    found: Grads = partitioned.run(folding(call), operands, letters, lambda _: results)
    return found


def _letters(settings: Settings, bias: Any, lengths: Others) -> tuple[Any, ...]:
    """The axes of query, key, value, bias and lengths, in the letters of `partitioned.run`, which
    splits a call over devices. JAX's own rule rejects keys and values sharded unlike queries."""
    query, key = ("b.n.", "b.k.") if settings.layout == "BTNH" else ("bn..", "bk..")
    added, counts = None if bias is None else "bn..", None if lengths is None else ("b", "b")
    return query, key, key, added, counts


def _mask_type(settings: Settings, lengths: Others) -> Any:
    from jax._src.cudnn import fused_attention_stablehlo as private

    kinds = private.MaskType
    if lengths is None:
        return kinds.CAUSAL if settings.causal else kinds.NO_MASK
    return kinds.PADDING_CAUSAL if settings.causal else kinds.PADDING


def folding(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `call` so that any `jax.vmap` folds the mapped axis into the batch axis.

    The batch axis is the first of every operand and result. Only the fourth operand, if it is a
    bias, may be None or have size 1 there, and so may its gradient, the fourth of four results.
    """
    mapped: Any = jax.custom_batching.custom_vmap(call)

    @mapped.def_vmap  # type: ignore[untyped-decorator]
    def rule(size: int, batched: Any, *operands: Any) -> Any:
        B = operands[0].shape[1 if batched[0] else 0]
        bias, shared = operands[3], None

        def fold(x: jax.Array, has_axis: bool) -> jax.Array:
            x = x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            if x.shape[1] != B:  # a bias that broadcasts over the batch
                x = jnp.broadcast_to(x, (size, B, *x.shape[2:]))
            return x.reshape(size * B, *x.shape[2:])

        if bias is not None:
            shared = bias.shape[1 if batched[3] else 0] != B
        found = mapped(*jax.tree.map(fold, operands, tuple(batched)))
        found = jax.tree.map(lambda x: x.reshape(size, B, *x.shape[1:]), found)
        if len(found) == 4 and shared and found[3] is not None:
            found = (*found[:3], found[3].sum(1, keepdims=True))
        return found, jax.tree.map(lambda _: True, found)

    folded: Callable[..., Any] = mapped
    return folded
