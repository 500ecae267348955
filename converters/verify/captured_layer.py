"""One attention layer as it computes: weights, behaviour, what its mask means, what it answered."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxmha import Mask, MHAParams, Semantics
from jaxmha.attention import as_mask
from jaxmha.converters.layout.arrays import NDArray, to_numpy, to_torch
from jaxmha.converters.masks.compose import array_of, checked
from jaxmha.converters.masks.spec import Masks, canonical_bias
from jaxmha.converters.verify import comparands
from jaxmha.converters.verify.comparands import BlockSide
from jaxmha.dims import bind
from jaxmha.extras import needed
from jaxmha.params import check

Inputs = tuple[NDArray, NDArray, NDArray]
# The path that a framework took, what its masks mean, and its output.
Called = tuple[str, Masks, Any]
# A bias of 0 and of one number below this blocks.
BLOCKS = -100.0


class Blocked(NamedTuple):
    """How a pair that may not attend is kept out.

    Attributes:
      constant: what its logit becomes; -inf: it is excluded.
      added: the constant is added to the logit instead. Then a row with nothing left is what the
        sums make of it: in float32 -1e9 leaves nothing of small logits, in float64 nearly all.
    """

    constant: float = -np.inf
    added: bool = False

    def __str__(self) -> str:
        if self.constant == -np.inf:
            return "excludes"
        return f"adds {self.constant:g}" if self.added else f"fills with {self.constant:g}"


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer, one call's masks, and its answer where it has a forward of its own.

    Attributes:
      params, semantics: weights and behaviour. `semantics.fully_masked` is the answer of a row with
        nothing left, but where a constant is added; a `softmax_dtype` that is narrower than the
        weights', or than float32, is reproduced.
      mask: a `Mask`, a Boolean array broadcastable to `B N T S` (True = attend), or None.
      bias: added to the logits. One of 0 and a number below -100 alone is a mask with that constant.
      blocked: how the mask keeps out.
      output: `B T Do`, what the layer itself answers; None: what its parameters say, exactly.
      name: for messages.

    >>> import jax, jaxmha
    >>> params = jaxmha.init_params(jax.random.key(0), num_heads=2, features=6)
    >>> Layer(params, blocked=Blocked(-1e9)).blocked.constant
    -1000000000.0
    """

    params: MHAParams
    semantics: Semantics = Semantics()  # noqa: RUF009 (frozen)
    mask: Any = None
    bias: Any = None
    blocked: Blocked = Blocked()  # noqa: RUF009
    output: NDArray | None = None
    name: str = "layer"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its weights, or of its output where that is narrower."""
        own = np.asarray(self.params.query.kernel).dtype
        return own if self.output is None else min(self.output.dtype, own, key=significand)

    def conditions(self, sizes: Mapping[str, int]) -> "tuple[Mask, NDArray | None, Blocked]":
        """Mask, bias and constant, checked against B, N, T, S, an additive mask read as a mask.

        Raises:
          ValueError, TypeError: a shape or dtype does not fit.
        """
        mask: Mask = checked(self.mask, sizes) if self.mask is not None else Mask()
        if self.bias is None:
            return mask, None, self.blocked
        bias = canonical_bias(self.bias, sizes).astype(np.float64)
        numbers = np.unique(bias[bias != 0])
        if mask.empty and len(numbers) == 1 and numbers[0] < BLOCKS:
            return Mask.dense(bias == 0), None, Blocked(float(numbers[0]), added=True)
        return mask, bias, self.blocked


def as_inputs(inputs: Any, params: MHAParams) -> Inputs:
    """Query, key and value as arrays, checked against a layer; one array stands for all three.

    Raises:
      ValueError: there are not three, or one has other axes, no rows, or NaN or infinity in it.
    """
    if isinstance(inputs, Mapping):
        if "query" not in inputs or inputs.keys() - {"query", "key", "value"}:
            names = ", ".join(map(str, inputs))
            raise ValueError(f"inputs: expected the keys query, key, value, got {names or 'none'}")
        key = inputs.get("key", inputs["query"])
        inputs = (inputs["query"], key, inputs.get("value", key))
    if not isinstance(inputs, tuple | list):
        inputs = (inputs,) * 3
    if len(inputs) != 3:
        raise ValueError(f"inputs: expected query, key, value or one array, got {len(inputs)}")
    arrays = {id(x): to_numpy(x) for x in inputs}
    query, key, value = (arrays[id(x)] for x in inputs)
    sizes = check(params)
    for name, array, axes in (
        ("query", query, "B T Dq"),
        ("key", key, "B S Dk"),
        ("value", value, "B S Dv"),
    ):
        bind(name, array.shape, axes, sizes)
        if not len(array):
            raise ValueError(f"{name}: no batch rows, got shape {array.shape}: give at least one")
        if bad := int((~np.isfinite(array)).sum()):
            what = "1 element is" if bad == 1 else f"{bad} elements are"
            reached = "it reaches" if bad == 1 else "they reach"
            raise ValueError(
                f"{name}: {what} not finite: outputs that {reached} cannot be compared; pass "
                "finite inputs"
            )
    return query, key, value


def of_block(
    block: BlockSide, inputs: Inputs, mask: Any = None, name: str = "", bias: Any = None
) -> Layer:
    """A block of a file, a state or a model on inputs and a canonical mask.

    A live layer is run on them by its own forward, in inference, and answers rows with nothing
    left by the path that it takes; parameters have no forward, and are computed exactly.

    Raises:
      ValueError: a bias for a live layer.
    """
    named = name or block.name or block.layout
    layer = Layer(block.params, block.semantics, mask, bias, name=named)
    if not block.live:
        return layer
    if bias is not None:
        raise ValueError(f"{named}: a live layer takes a bias only as an argument of its own")
    (B, T), S = inputs[0].shape[:2], inputs[1].shape[1]
    sizes = {"B": B, "N": check(block.params)["N"], "T": T, "S": S}
    array = None if mask is None else array_of(checked(as_mask(mask), sizes), T, S)
    if array is not None:  # padding stays `(B, 1, 1, S)`, which torch takes as another argument
        array = np.ascontiguousarray(np.broadcast_to(array, (B, *array.shape[1:3], S)))
    output = to_numpy(block.forward(*_own_dtype(block, inputs), array))
    widths = check(block.params)  # Keras' `forward` asks for scores where its fused path cannot run
    path = _path(block, scores=widths["h"] != widths["H"])
    return _as(block, path, mask, None, output, named)


def _own_dtype(block: BlockSide, inputs: Inputs) -> Inputs:
    """Inputs in the dtype of torch's weights, which takes no other; one array stays one."""
    if block.kind != "torch":
        return inputs
    dtype = np.asarray(block.params.query.kernel).dtype
    arrays = {id(x): x.astype(dtype, copy=False) for x in inputs}
    query, key, value = (arrays[id(x)] for x in inputs)
    return query, key, value


def significand(dtype: Any) -> int:
    """Bits of it that a floating dtype stores."""
    return int(ml_dtypes.finfo(dtype).nmant)  # type: ignore[no-untyped-call]


def _path(block: BlockSide, *, scores: bool = False) -> str:
    """The path of a live layer in inference, as the presets of `Semantics` name it."""
    dropout = block.semantics.dropout_rate > 0
    if block.kind == "torch":
        return "sdpa"
    if block.kind == "keras":
        return "scores" if scores or dropout else "fused"
    # linen, and nnx with dropout even where it is off, have one of their own.
    return "fused" if block.kind == "nnx" and not dropout else "weights"


def _as(block: BlockSide, path: str, mask: Any, bias: Any, output: NDArray, name: str) -> Layer:
    """The layer with the behaviour of a path of its framework."""
    presets: dict[str, Any] = {"torch": Semantics.torch, "keras": Semantics.keras}
    dtype = np.asarray(block.params.query.kernel).dtype
    like = presets.get(block.kind, Semantics.flax)(path, dtype=dtype)
    softmax = like.softmax_dtype
    if (block.kind, path) == ("keras", "fused"):
        import keras

        softmax = softmax if keras.backend.backend() == "jax" else None
    semantics = replace(block.semantics, fully_masked=like.fully_masked, softmax_dtype=softmax)
    filled = Blocked(-3e4 if dtype == np.float16 else -1e9)
    blocked = filled if (block.kind, path) == ("keras", "scores") else Blocked()
    return Layer(block.params, semantics, mask, bias, blocked, output, name)


def of_call(module: Any, inputs: Inputs, arguments: Mapping[str, Any], name: str = "") -> Layer:
    """A live layer of torch, Keras or flax in a call with mask arguments of its own framework.

    Inputs that are one array stay one: torch then takes another path in eval.

    Raises:
      TypeError: it is no such layer. ValueError: the arguments do not fit, or mean what has no
        counterpart here.
    """
    found = comparands.read(module).blocks
    if len(found) != 1 or not found[0].live:
        raise TypeError(
            "mask arguments of a framework need one live layer of torch, keras or flax; for "
            "parameters and files give mask= and bias="
        )
    block = found[0]
    run = {"torch": _torch_call, "keras": _keras_call}.get(block.kind, _flax_call)
    with comparands.exact_dtypes(inputs[0].dtype):
        path, (mask, bias), output = run(module, block, inputs, dict(arguments))
    return _as(block, path, mask, bias, to_numpy(output), name or block.name or block.layout)


def _torch_call(module: Any, block: BlockSide, inputs: Inputs, arguments: dict[str, Any]) -> Called:
    with needed("torch"):
        import torch

    from jaxmha.converters.masks import torch as masks

    arguments = {"need_weights": True, **arguments}
    query, key, value = _own_dtype(block, inputs)
    tensors: list[Any] = [to_torch(query)]
    tensors.append(tensors[0] if key is query else to_torch(key))
    tensors.append(tensors[1] if value is key else to_torch(value))
    if not module.batch_first:
        moved = {id(x): x.transpose(0, 1) for x in tensors}
        tensors = [moved[id(x)] for x in tensors]
    given = {
        k: to_torch(to_numpy(x)) if k.endswith("mask") and x is not None else x
        for k, x in arguments.items()
    }
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            of_path = ("attn_mask", "key_padding_mask", "need_weights")
            path = masks.path_of(module, *tensors, **{k: given[k] for k in of_path if k in given})
            out = module(*tensors, **given)[0]
    finally:
        module.train(training)
    meaning = masks.import_masks(
        num_heads=module.num_heads,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        path=path,
        **{k: x for k, x in arguments.items() if k != "average_attn_weights"},
    )
    return path, meaning, out if module.batch_first else out.transpose(0, 1)


def _keras_call(layer: Any, block: BlockSide, inputs: Inputs, arguments: dict[str, Any]) -> Called:
    from jaxmha.converters.masks import keras as masks

    query, key, value = inputs
    scores = bool(arguments.pop("return_attention_scores", False))
    out = layer(query, value, key, training=False, return_attention_scores=scores, **arguments)
    grouped = "num_key_value_heads" in layer.get_config()
    meaning = masks.import_masks(
        num_heads=check(block.params)["N"], kind="gqa" if grouped else "mha", **arguments
    )
    return _path(block, scores=scores), meaning, out[0] if scores else out


def _flax_call(module: Any, block: BlockSide, inputs: Inputs, arguments: dict[str, Any]) -> Called:
    from jaxmha.converters.masks import flax as masks

    layer, variables = module if isinstance(module, tuple) else (module, None)
    own = {"deterministic": True, **arguments}
    out = layer.apply(variables, *inputs, **own) if variables else layer(*inputs, **own)
    meaning = masks.import_masks(
        num_heads=check(block.params)["N"], query_length=inputs[0].shape[1], **arguments
    )
    return _path(block), meaning, out
