"""Records one call of an attention layer: weights, behaviour, mask and output."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxmha import Mask, MHAParams, Semantics
from jaxmha.converters.keras import needs_scores
from jaxmha.converters.layout.arrays import NDArray, narrower, to_numpy, to_torch
from jaxmha.converters.masks.compose import array_of, checked
from jaxmha.converters.masks.spec import Masks, canonical_bias
from jaxmha.converters.verify import comparands
from jaxmha.converters.verify.comparands import ComparedBlock
from jaxmha.dims import bind
from jaxmha.extras import needed
from jaxmha.mask_arguments import as_mask
from jaxmha.params import check

Inputs = tuple[NDArray, NDArray, NDArray]
# Result of a call: (code path of the framework, (mask, bias), output).
Called = tuple[str, Masks, Any]
# `ComparedBlock.kind` -> its key in `comparands.FRAMEWORKS`, where the two differ.
_PACKAGES = {"linen": "flax", "nnx": "flax", "jaxmha.flax": "flax"}
# A bias with only zeros and one number below this value is treated as a mask that adds the number.
BLOCKS = -100.0


class Blocked(NamedTuple):
    """How the layer excludes a masked pair.

    Attributes:
      constant: number added to, or filled into, the logit of a masked pair; -inf excludes the pair
        exactly.
      added: True adds the constant to the logit, False replaces the logit. If it is added, the
        softmax of a fully masked row depends on the rounding of the sums: adding -1e9 erases small
        logits in float32, and keeps most of their digits in float64.
    """

    constant: float = -np.inf
    added: bool = False

    def __str__(self) -> str:
        if self.constant == -np.inf:
            return "excludes"
        return f"adds {self.constant:g}" if self.added else f"fills with {self.constant:g}"


@dataclass(frozen=True, eq=False)
class Layer:
    """An attention layer, the masks of one call, and the output if the layer has its own forward.

    Attributes:
      params, semantics: weights and behaviour. `semantics.fully_masked` is the output for a fully
        masked row, unless `blocked` adds a constant. The softmax is rounded to a `softmax_dtype`
        narrower than float32 (narrower than float64 for float64 weights).
      mask: a `Mask`, a Boolean array broadcastable to `B N T S` (True = attend), or None.
      bias: added to the logits. Without a mask, a bias of only 0 and one number below -100 is a
        mask that adds this number.
      blocked: how masked pairs are excluded.
      output: `B T Do`, the layer's own output; None uses the float64 output of the parameters.
      name: name of the layer in messages.

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
        """The dtype of the weights, or of the output if that is narrower."""
        own = np.asarray(self.params.query.kernel).dtype
        return own if self.output is None else narrower(own, self.output.dtype)

    def conditions(self, sizes: Mapping[str, int]) -> "tuple[Mask, NDArray | None, Blocked]":
        """Returns the mask, the bias and how masked pairs are excluded, checked against `sizes`.

        `sizes` gives B, N, T and S. If there is no mask, and the bias holds only 0 and one number
        below `BLOCKS`, the bias is returned as a mask that adds this number.

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
    """Returns query, key and value as arrays; a single array is used for all three.

    Shapes are checked against `params`.

    Raises:
      ValueError: there are not three arrays, or one has other axes, no rows, or non-finite
        elements.
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
    block: ComparedBlock, inputs: Inputs, mask: Any = None, name: str = "", bias: Any = None
) -> Layer:
    """Returns a block of a file, state dict or model as a `Layer` with a mask in jaxmha's form.

    A layer object runs its own forward on the inputs, in inference mode; its code path determines
    the output of fully masked rows. The `Layer` of parameters alone has no output.

    Raises:
      ValueError: a bias was given for a layer object.
    """
    named = name or block.name or block.layout
    layer = Layer(block.params, block.semantics, mask, bias, name=named)
    if not block.is_live:
        return layer
    if bias is not None:
        raise ValueError(f"{named}: a live layer takes a bias only as an argument of its own")
    (B, T), S = inputs[0].shape[:2], inputs[1].shape[1]
    sizes = {"B": B, "N": check(block.params)["N"], "T": T, "S": S}
    array = None if mask is None else array_of(checked(as_mask(mask), sizes), T, S)
    if array is not None:  # torch passes (B, 1, 1, S) as key_padding_mask if B and S are full
        array = np.ascontiguousarray(np.broadcast_to(array, (B, *array.shape[1:3], S)))
    output = to_numpy(block.forward(*_own_dtype(block, inputs), array))
    widths = check(block.params)  # Keras computes explicit scores if h != H
    path = _path(block, scores=widths["h"] != widths["H"])
    return _as(block, path, mask, None, output, named)


def _own_dtype(block: ComparedBlock, inputs: Inputs) -> Inputs:
    """Casts the inputs of a torch layer to the weights' dtype; shared arrays stay shared."""
    if block.kind != "torch":
        return inputs
    dtype = np.asarray(block.params.query.kernel).dtype
    arrays = {id(x): x.astype(dtype, copy=False) for x in inputs}
    query, key, value = (arrays[id(x)] for x in inputs)
    return query, key, value


def _path(block: ComparedBlock, *, scores: bool = False) -> str:
    """Returns the code path of a layer object in inference, as presets of `Semantics` name it.

    `scores`: True if a Keras layer returns, or has to compute, attention scores.
    """
    dropout = block.semantics.dropout_rate > 0
    if block.kind == "torch":
        return "sdpa"
    if block.kind == "keras":
        return "scores" if scores or dropout else "fused"
    # linen, and nnx with dropout (even if inactive), compute the weights explicitly.
    return "fused" if block.kind == "nnx" and not dropout else "weights"


_PRESETS: dict[str, Any] = {
    "torch": Semantics.torch,
    "keras": Semantics.keras,
    "linen": Semantics.flax,
    "nnx": Semantics.flax,
    "equinox": lambda path, dtype: Semantics.equinox(),  # one path, and a softmax in float32
}


def _as(block: ComparedBlock, path: str, mask: Any, bias: Any, output: NDArray, name: str) -> Layer:
    """Returns a `Layer` with the semantics of one code path of the block's framework."""
    layer = Layer(block.params, block.semantics, mask, bias, Blocked(), output, name)
    if block.kind not in _PRESETS:  # a framework whose layers have no preset
        return layer
    dtype = layer.dtype  # a layer may compute in a narrower dtype than that of its weights
    like = _PRESETS[block.kind](path, dtype=dtype)
    softmax = like.softmax_dtype
    blocked = Blocked()
    if block.kind == "keras":
        softmax, blocked = _of_backend(path, dtype, softmax)
    semantics = replace(block.semantics, fully_masked=like.fully_masked, softmax_dtype=softmax)
    return replace(layer, semantics=semantics, blocked=blocked)


def _of_backend(path: str, dtype: np.dtype[Any], softmax: Any) -> tuple[Any, Blocked]:
    """Returns the softmax dtype of a code path on the backend of Keras, and how it excludes pairs.

    Source: `dot_product_attention` in keras/src/backend/*/nn.py.
    """
    import keras

    backend, half = keras.backend.backend(), dtype == np.float16
    if path == "scores":
        return softmax, Blocked(-3e4 if half else -1e9)
    if backend == "torch" and half:  # added in float32: a fully masked row keeps its logits
        return softmax, Blocked(float(np.float16(-45850.0)), added=True)
    return None if backend == "tensorflow" else softmax, Blocked()


def of_call(module: Any, inputs: Inputs, arguments: Mapping[str, Any], name: str = "") -> Layer:
    """Calls a layer object of torch, Keras or flax with mask arguments of its own framework.

    If query, key and value share an array, torch gets one tensor, because it then takes another
    code path in eval mode.

    Raises:
      TypeError: `module` is no such layer, for example a model that contains one.
      ValueError: the arguments do not fit, or jaxmha cannot express their meaning.
    """
    found = comparands.read(module).blocks
    if len(found) != 1 or not found[0].is_live or found[0].kind not in _CALLS:
        raise TypeError(
            "mask arguments of a framework need one live layer of torch, keras or flax; for "
            "parameters and files give mask= and bias="
        )
    block = found[0]
    framework = comparands.FRAMEWORKS[_PACKAGES.get(block.kind, block.kind)]
    if all(layer is not module for _, layer in framework.attention_layers(module)):
        raise TypeError(
            f"mask arguments are those of one attention layer, and a {type(module).__name__} is a "
            f"model: give its layer {block.name!r} and the inputs of that layer; "
            f"{comparands.OF_MODELS}"
        )
    with comparands.exact_dtypes(inputs[0].dtype):
        path, (mask, bias), output = _CALLS[block.kind](module, block, inputs, dict(arguments))
    return _as(block, path, mask, bias, to_numpy(output), name or block.name or block.layout)


def _torch_call(
    module: Any, block: ComparedBlock, inputs: Inputs, arguments: dict[str, Any]
) -> Called:
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
            known: dict[str, Any] = {k: given[k] for k in of_path if k in given}
            path = masks.path_of(module, *tensors, **known)
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


def _keras_call(
    layer: Any, block: ComparedBlock, inputs: Inputs, arguments: dict[str, Any]
) -> Called:
    from jaxmha.converters.masks import keras as masks

    query, key, value = inputs
    asked = bool(arguments.pop("return_attention_scores", False))
    scores = asked or needs_scores(layer)
    out = layer(query, value, key, training=False, return_attention_scores=scores, **arguments)
    grouped = "num_key_value_heads" in layer.get_config()
    meaning = masks.import_masks(
        num_heads=check(block.params)["N"],
        kind="gqa" if grouped else "mha",
        attention_axes=block.semantics.attention_axes,
        input_axes=np.ndim(query),
        **arguments,
    )
    return _path(block, scores=scores), meaning, out[0] if scores else out


def _flax_output(module: Any, inputs: Inputs, arguments: Mapping[str, Any]) -> Any:
    """Runs an nnx module, or a pair of a linen module and its variables, without dropout."""
    layer, variables = module if isinstance(module, tuple) else (module, None)
    own = {"deterministic": True, **arguments}
    return layer.apply(variables, *inputs, **own) if variables else layer(*inputs, **own)


def _flax_call(
    module: Any, block: ComparedBlock, inputs: Inputs, arguments: dict[str, Any]
) -> Called:
    from jaxmha.converters.masks import flax as masks

    out = _flax_output(module, inputs, arguments)
    meaning = masks.import_masks(
        num_heads=check(block.params)["N"], query_length=inputs[0].shape[1], **arguments
    )
    return _path(block), meaning, out


def _own_call(
    module: Any, block: ComparedBlock, inputs: Inputs, arguments: dict[str, Any]
) -> Called:
    from jaxmha.flax.settings import read_mask

    out = _flax_output(module, inputs, arguments)
    mask = read_mask(arguments.get("mask"), None, arguments.get("is_causal", False))
    return _path(block), (None if mask.empty else mask, arguments.get("bias")), out


# Framework -> function that calls a layer object with the framework's own mask arguments.
_CALLS: dict[str, Callable[[Any, ComparedBlock, Inputs, dict[str, Any]], Called]] = {
    "torch": _torch_call,
    "keras": _keras_call,
    "linen": _flax_call,
    "nnx": _flax_call,
    "jaxmha.flax": _own_call,
}
