"""Both ways through keras.layers.MultiHeadAttention, on the backend of this process."""

from functools import cache
from typing import Any

from experiments.numerics import inputs
from experiments.numerics.compiling import compiled
from experiments.numerics.inputs import Run, T, UnsupportedError
from jaxmha import MHAParams
from jaxmha.converters import keras as convert
from jaxmha.converters.layout.arrays import NDArray, to_numpy


def runs(backend: str) -> dict[str, Run]:
    """Name -> run. `fused` as called by default, `scores` with the attention scores asked for."""
    return {f"keras on {backend}, {path}": _run(path) for path in ("fused", "scores")}


@cache
def _layer(path: str, dtype: str) -> tuple[Any, Any]:
    """A layer; on JAX also a program of it, jitted and plain, whose weights are arguments."""
    import keras

    layer = convert.to_module(inputs.params(dtype))
    options = {"training": False, "return_attention_scores": path == "scores"}
    if keras.backend.backend() != "jax":
        return layer, None
    import jax

    fixed = [variable.value for variable in layer.non_trainable_variables]

    def call(variables: Any, x: Any, mask: Any) -> Any:
        query = x[:, :T]
        return layer.stateless_call(variables, fixed, query, x, x, attention_mask=mask, **options)[
            0
        ]

    return layer, (jax.jit(call), call)


def _run(path: str) -> Run:
    def run(weights: MHAParams, x: NDArray, keep: Any, bias: Any) -> NDArray:
        if bias is not None:
            raise UnsupportedError("the layer takes no additive mask")
        layer, program = _layer(path, x.dtype.name)
        state = convert.export_params(weights, layout=convert.VARIABLES.name)
        variables = {"/".join(v.path.split("/")[-2:]): v for v in layer.trainable_variables}
        mask = None if keep is None else keep[None, None]
        if program is not None:
            import jax

            values = [state[name] for name in variables]
            arrays = jax.tree.map(jax.numpy.asarray, (values, x, mask))
            out = compiled(f"keras on jax, {path}", x.dtype.name, *program, *arrays)
        else:
            for name, variable in variables.items():
                variable.assign(state[name])
            out = layer(
                x[:, :T],
                x,
                x,
                attention_mask=mask,
                training=False,
                return_attention_scores=path == "scores",
            )
        out = out[0] if isinstance(out, tuple | list) else out
        first: NDArray = to_numpy(out)[0]
        return first

    return run
