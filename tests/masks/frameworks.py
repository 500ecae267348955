"""Every framework's functions, what they refuse, and a live call of each path, as data."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from jaxmha import Mask, MHAParams, Projection, Semantics
from jaxmha.converters import flax as flax_layers
from jaxmha.converters import keras as keras_layers
from jaxmha.converters import torch as torch_layers
from jaxmha.converters.layout.arrays import NDArray, to_numpy, to_torch
from jaxmha.converters.masks import flax, handwritten, huggingface, keras, sdpa
from jaxmha.converters.masks import jax as jax_nn
from jaxmha.converters.masks import torch as torch_mha
from tests.drawn import to_jax
from tests.masks.draws import Sizes, numbers, pairs
from tests.promotion import foreign

H = 4
Call = Callable[..., NDArray]
Rejected = Callable[[Mask, Sizes], str | None]


class MaskApi(NamedTuple):
    """A framework's `export_masks` and `import_masks`, and how to call them.

    Attributes:
      module: that has them.
      sizes: the names of those that the exporter takes.
      bias: whether there is an argument that is added to the logits.
      beyond: whether rows beyond a query length can be said.
      fills: whether what a mask blocks is filled after the bias was added.
      exporting: further arguments of the exporter.
      importing: further arguments of the importer, of sizes.
      refuses: words of the error, where the target cannot hold the mask.
    """

    module: ModuleType
    sizes: tuple[str, ...] = ("query_length", "key_length")
    bias: bool = False
    beyond: bool = False
    fills: bool = False
    exporting: Mapping[str, Any] = MappingProxyType({})
    importing: Callable[[Sizes], Any] = lambda _: {}
    refuses: Rejected = lambda mask, sizes: None


def per_head(mask: Mask, sizes: Sizes) -> str | None:
    kept = pairs(mask, None, sizes)
    return "heads" if (kept != kept[:, :1]).any() else None


def two_axes(mask: Mask, sizes: Sizes, style: str = "filled") -> str | None:
    """Hand-written layers: three axes without heads, or heads and keys."""
    kept = pairs(mask, None, sizes)
    wide = (kept != kept[:1]).any() or (kept != kept[:, :, :1]).any()
    if style == "added" and not mask.empty and not kept.any(-1).all():
        return "nothing to attend"
    return "cannot hold a mask" if per_head(mask, sizes) and wide else None


def extras(mask: Mask, sizes: Sizes) -> str | None:
    return None if mask.query_padding is None else "stay visible"


ALL = ("batch_size", "num_heads", "query_length", "key_length")
NO_HEADS = ("batch_size", "query_length", "key_length")


def heads(sizes: Sizes) -> Any:
    return {"num_heads": sizes.N}


def rows(sizes: Sizes) -> Any:
    return {"num_heads": sizes.N, "query_length": sizes.T}


def lengths(sizes: Sizes) -> Any:
    return {"query_length": sizes.T, "key_length": sizes.S}


APIS = {
    "torch": MaskApi(torch_mha, ALL, bias=True, importing=heads),
    "torch zero": MaskApi(torch_mha, ALL, bias=True, exporting={"add_zero_attn": True},
        importing=lambda sizes: heads(sizes) | {"add_zero_attn": True}, refuses=extras),
    "sdpa": MaskApi(sdpa, ALL, True, True,
        importing=lambda sizes: heads(sizes) | {"kernel": "math"}),
    "keras": MaskApi(keras, refuses=per_head),
    "keras heads": MaskApi(keras, exporting={"per_head": True}),
    "gqa": MaskApi(keras, exporting={"kind": "gqa", "per_head": True},
        importing=lambda _: {"kind": "gqa"}),
    "linen": MaskApi(flax, exporting={"kind": "linen"}, importing=heads),
    "nnx": MaskApi(flax, importing=heads),
    "flax function": MaskApi(flax, bias=True, exporting={"function": True}, importing=rows,
        fills=True),
    "jax": MaskApi(jax_nn, NO_HEADS, bias=True, beyond=True, importing=rows, fills=True),
    "huggingface": MaskApi(huggingface, NO_HEADS, bias=True, importing=lengths),
    "scores": MaskApi(huggingface, NO_HEADS, bias=True, exporting={"form": "scores"},
        importing=lengths),
    "causal model": MaskApi(huggingface, NO_HEADS, bias=True, exporting={"is_causal": True},
        importing=lambda sizes: lengths(sizes) | {"is_causal": True}),
    "filled": MaskApi(handwritten, exporting={"style": "filled"},
        importing=lambda _: {"style": "filled"}, refuses=two_axes),
    "added": MaskApi(handwritten, exporting={"style": "added"},
        importing=lambda _: {"style": "added"}, refuses=partial(two_axes, style="added")),
}  # fmt: skip


class Live(NamedTuple):
    """A path of a live framework.

    Attributes:
      functions: of `VERBS`.
      make: sizes to a call of the exported arguments; `(B, T, D)` of a layer with `params`, or
        `(B, T, N, H)` of a function.
      semantics: of the path.
      layer: whether it is a layer.
      groups: K, where not N.
      no_keys: whether it takes axes of size 0, and a row of no keys is one with nothing left.
    """

    api: str
    make: Callable[[Sizes], Call]
    semantics: Semantics
    layer: bool = False
    groups: int | None = None
    no_keys: bool = True


@cache
def params(N: int, K: int) -> MHAParams:
    """Random weights and biases, as every framework can hold them."""
    D = N * H
    inside: Any = [
        Projection(0.3 * numbers(D, n, H, seed=i), 0.3 * numbers(n, H, seed=i))
        for i, n in enumerate((N, K, K))
    ]
    inside.append(Projection(0.3 * numbers(N, H, D), 0.3 * numbers(D)))
    return MHAParams(*inside)


def inputs(sizes: Sizes, layer: bool) -> list[NDArray]:
    tail = (sizes.N * H,) if layer else (sizes.N, H)
    ends = (sizes.T, sizes.S, sizes.S)
    return [numbers(sizes.B, length, *tail, seed=i) for i, length in enumerate(ends)]


def torch_live(sizes: Sizes, need_weights: bool, zero_attn: bool = False) -> Call:
    semantics = Semantics(add_zero_attn=zero_attn)
    module = torch_layers.to_module(params(sizes.N, sizes.N), semantics)
    given = [to_torch(x) for x in inputs(sizes, layer=True)]

    def call(**arguments: Any) -> NDArray:
        arguments = {"need_weights": need_weights, **arguments}
        return to_numpy(module(*given, **tensors(arguments))[0])

    return call


def tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}


def sdpa_live(sizes: Sizes) -> Call:
    given = [to_torch(x).transpose(1, 2) for x in inputs(sizes, layer=False)]
    run: Any = torch.nn.functional.scaled_dot_product_attention
    return lambda **arguments: to_numpy(run(*given, **tensors(arguments)).transpose(1, 2))


def keras_live(sizes: Sizes, kind: keras.Kind, scores: bool) -> Call:
    weights = params(sizes.N, 1 if kind == "gqa" else sizes.N)
    module = keras_layers.to_module(weights, kind=kind)
    query, key, value = inputs(sizes, layer=True)

    def call(**arguments: Any) -> NDArray:
        with foreign():
            found = module(query, value, key, return_attention_scores=scores, **arguments)
        return to_numpy(found[0] if scores else found)

    return call


def flax_live(sizes: Sizes, kind: Any, sow: bool = False) -> Call:
    made: Any = flax_layers.to_module(params(sizes.N, sizes.N), kind=kind)
    given = [to_jax(x) for x in inputs(sizes, layer=True)]

    def call(**arguments: Any) -> NDArray:
        with foreign():
            if kind == "linen":
                return to_numpy(made[0].apply(made[1], *given, **arrays(arguments)))
            return to_numpy(made(*given, sow_weights=sow, **arrays(arguments)))

    return call


def arrays(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: to_jax(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}


def jax_live(sizes: Sizes) -> Call:
    given = [to_jax(x) for x in inputs(sizes, layer=False)]
    run: Any = jax.nn.dot_product_attention

    def call(**arguments: Any) -> NDArray:
        with foreign():
            return to_numpy(run(*given, **arrays(arguments)))

    return call


def bert_live(sizes: Sizes, implementation: str) -> Call:
    """BERT's attention on heads, as its layer calls it, with a mask of four axes."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.bert import modeling_bert

    eager = modeling_bert.eager_attention_forward
    run: Any = eager if implementation == "eager" else sdpa_attention_forward
    module = torch.nn.Module().eval()
    module.is_causal = False  # type: ignore[assignment]
    given = [to_torch(x).transpose(1, 2) for x in inputs(sizes, layer=False)]

    def call(attention_mask: NDArray | None = None) -> NDArray:
        mask = None if attention_mask is None else to_torch(attention_mask)
        return to_numpy(run(module, *given, mask, scaling=H**-0.5, dropout=0.0)[0])

    return call


def filled_live(sizes: Sizes, style: str = "filled") -> Call:
    """Attention with the mask applied as hand-written layers do."""
    q, k, v = (to_torch(x).transpose(1, 2) for x in inputs(sizes, layer=False))

    def call(mask: NDArray | None = None) -> NDArray:
        logits = q @ k.transpose(-2, -1) / H**0.5
        if mask is not None and style == "filled":
            logits = logits.masked_fill(to_torch(mask).unsqueeze(1) == 0, -1e9)
        elif mask is not None:
            logits = logits + to_torch(mask).unsqueeze(1).float() * -1e9
        return to_numpy((logits.softmax(-1) @ v).transpose(1, 2))

    return call


_ZERO = partial(torch_live, zero_attn=True)
LIVE = {
    "torch weights": Live("torch", partial(torch_live, need_weights=True),
        Semantics.torch("weights"), layer=True, no_keys=False),
    "torch sdpa": Live("torch", partial(torch_live, need_weights=False), Semantics.torch("sdpa"),
        layer=True, no_keys=False),
    "torch zero": Live("torch zero", partial(_ZERO, need_weights=True),
        Semantics.torch("weights", add_zero_attn=True), True),
    "sdpa": Live("sdpa", sdpa_live, Semantics.torch_sdpa()),
    "keras fused": Live("keras heads", partial(keras_live, kind="mha", scores=False),
        Semantics.keras(), True),
    "keras scores": Live("keras heads", partial(keras_live, kind="mha", scores=True),
        Semantics.keras("scores"), True),
    "gqa fused": Live("gqa", partial(keras_live, kind="gqa", scores=False), Semantics.keras(),
        True, 1),
    "linen": Live("linen", partial(flax_live, kind="linen"), Semantics.flax(), True),
    "nnx fast": Live("nnx", partial(flax_live, kind="nnx"), Semantics.flax("fused"), True),
    "nnx slow": Live("nnx", partial(flax_live, kind="nnx", sow=True), Semantics.flax(), True),
    "jax": Live("jax", jax_live, Semantics.jax()),
    "bert eager": Live("scores", partial(bert_live, implementation="eager"),
        Semantics(fully_masked="mean")),
    "bert sdpa": Live("scores", partial(bert_live, implementation="sdpa"),
        Semantics(fully_masked="mean"), no_keys=False),
    "filled": Live("filled", filled_live, Semantics(fully_masked="mean")),
    "added": Live("added", partial(filled_live, style="added"), Semantics()),
}  # fmt: skip
