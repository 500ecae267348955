"""Both ways through keras.layers.MultiHeadAttention on TensorFlow, operation by operation."""

from functools import cache, partial
from typing import Any

from experiments.numerics import inputs
from experiments.numerics.inputs import Run, T
from jaxmha import MHAParams
from jaxmha.bench.program import UnsupportedError
from jaxmha.converters import keras as convert
from jaxmha.converters.layout.arrays import NDArray, to_numpy


@cache
def _layer(dtype: str) -> Any:
    return convert.to_module(inputs.params(dtype))


def _run(scores: bool, weights: MHAParams, x: NDArray, keep: Any, bias: Any) -> NDArray:
    """`scores`: with the attention scores asked for."""
    if bias is not None:
        raise UnsupportedError("the layer takes no additive mask")
    layer = _layer(x.dtype.name)
    state = convert.export_params(weights, layout=convert.VARIABLES.name)
    for variable in layer.trainable_variables:
        variable.assign(state["/".join(variable.path.split("/")[-2:])])
    options = {"training": False, "return_attention_scores": scores}
    mask = None if keep is None else keep[None, None]
    out = layer(x[:, :T], x, x, attention_mask=mask, **options)
    first: NDArray = to_numpy(out[0] if scores else out)[0]
    return first


RUNS: dict[str, Run] = {
    f"keras on tensorflow, {path}": partial(_run, path == "scores") for path in ("fused", "scores")
}
