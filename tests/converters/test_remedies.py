"""Messages about layers that are refused name a remedy, and it works when it is followed."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch as torch_library
from flax import linen, nnx
from torch.nn import utils
from torch.nn.utils import parametrizations, prune

import jaxmha
from jaxmha.converters import equinox, flax, keras, torch
from jaxmha.converters.layout import parametrized
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify.comparison import compare
from tests.converters.test_own_forward import D, N, of_equinox, of_linen, of_nnx, of_torch
from tests.tolerance import assert_close

H = 3
COMPUTED: dict[str, Callable[..., Any]] = {
    "prune": partial(prune.l1_unstructured, amount=0.5),
    "weight_norm": utils.weight_norm,
    "spectral_norm": utils.spectral_norm,
    "parametrizations": parametrizations.weight_norm,
}


def of_computed(kind: str, name: str) -> Any:
    layer = of_torch()
    owner, _, leaf = name.rpartition(".")
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):
        COMPUTED[kind](layer.get_submodule(owner), leaf)
    return layer


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, "in_proj_weight") for kind in COMPUTED]
    # torch's layer does not call out_proj, so spectral_norm has no effect on it.
    + [(kind, "out_proj.weight") for kind in COMPUTED if kind != "spectral_norm"],
)
def test_parameters_that_torch_computes(kind: str, name: str) -> None:
    module = of_computed(kind, name).eval()
    module(*[torch_library.ones(1, 2, D)] * 3)  # computes in_proj_weight
    expected = {"in_proj_weight": module.in_proj_weight, "out_proj.weight": module.out_proj.weight}
    expected = {key: tensor.detach().clone() for key, tensor in expected.items()}
    with pytest.raises(ValueError, match="store its values first by") as refused:
        torch.import_params(module.state_dict(), num_heads=N)
    within = {f"encoder.0.{key}": x.numpy() for key, x in module.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"encoder.0 looks like layout torch, but .* first by .*get"
    ):
        pipeline.convert_state(within, to="jaxmha", num_heads=N)
    (remedy,) = re.findall(r"first by (torch\S+ \S+\))", str(refused.value))
    eval(remedy, {"torch": torch_library, "module": module})
    params, _ = torch.import_params(module.state_dict(), num_heads=N)
    kernel = params.query.kernel if name == "in_proj_weight" else params.out.kernel  # type: ignore[union-attr]
    np.testing.assert_array_equal(np.asarray(kernel).reshape(D, D), expected[name][:D].T)


def test_endings_of_other_tensors_are_no_parameters() -> None:
    names = ["a.w_g", "b.w_v", "c.w_orig", "d.parametrizations.w", "e.w_mask"]
    assert list(parametrized.computed(names)) == ["d.w"]
    assert not parametrized.remedies(["a.w", "b.w", "c.w"], names)


@pytest.mark.parametrize("kind", ["LoRALinear", "LoRA"])
def test_an_adapter_of_nnx_is_merged(kind: str) -> None:
    module, rngs, base = of_nnx(), nnx.Rngs(1), nnx.Linear(D, D, rngs=nnx.Rngs(2))
    if kind == "LoRA":
        module.query = nnx.LoRA(D, 2, D, base_module=base, rngs=rngs)
    else:
        module.query = nnx.LoRALinear(D, D, lora_rank=2, rngs=rngs)
    with pytest.raises(ValueError, match=f"module.query is a {kind}, whose adapter") as refused:
        flax.from_module(module)
    found = re.search(r"and the kernel (.*), both", str(refused.value))
    assert found is not None
    kernel = eval(found[1], {"module": module})
    lora = module.query.lora if kind == "LoRALinear" else module.query
    base = module.query if kind == "LoRALinear" else module.query.base_module
    assert_close(
        kernel, np.asarray(base.kernel) + np.asarray(lora.lora_a) @ np.asarray(lora.lora_b)
    )
    module.query = nnx.LinearGeneral(D, (N, H), rngs=rngs)
    module.query.kernel[...] = kernel.reshape(D, N, H)
    assert_close(flax.from_module(module)[0].query.kernel, kernel.reshape(D, N, H))


def test_norms_of_nnx_without_a_scale_or_with_a_bias() -> None:
    module = of_nnx(normalize_qk=True)
    module.query_ln, module.key_ln = (
        nnx.LayerNorm(H, use_scale=False, rngs=nnx.Rngs(0)) for _ in range(2)
    )
    for name in ("query_ln", "key_ln"):
        with pytest.raises(ValueError, match=f"module.{name} has no scale") as refused:
            flax.from_module(module)
        assert str(refused.value).endswith(f", module.{name}.scale = nnx.Param(jnp.ones({H}))")
        getattr(module, name).scale = nnx.Param(jnp.ones(H))
        with pytest.raises(ValueError, match=f"module.{name} has a bias") as refused:
            flax.from_module(module)
        assert str(refused.value).endswith(f", module.{name}.bias = None")
        getattr(module, name).bias = None
    norm: Any = flax.from_module(module)[0].query_norm
    np.testing.assert_array_equal(norm, np.ones(H))


@pytest.mark.parametrize("kind", ["nnx", "linen", "equinox"])
def test_layers_without_values(kind: str) -> None:
    given: Any = {
        "nnx": lambda: (nnx.eval_shape(of_nnx),),  # type: ignore[no-untyped-call]
        "linen": lambda: (
            linen.MultiHeadDotProductAttention(N),
            jax.eval_shape(lambda: of_linen()[1]),
        ),
        "equinox": lambda: (jax.eval_shape(of_equinox),),
    }[kind]()
    converter: Any = equinox if kind == "equinox" else flax
    with pytest.raises(ValueError, match=r"(query_proj.weight|key/bias): .*float32.* no values"):
        converter.from_module(*given)


def test_parameters_without_values() -> None:
    params = jax.eval_shape(
        lambda: jaxmha.init_params(jax.random.key(0), num_heads=N, features=D, dtype=jnp.float32)
    )
    for converter in (flax, torch, keras):
        with pytest.raises(ValueError, match="is abstract and has no values"):
            converter.export_params(params)


def test_a_stack_of_layers_of_linen() -> None:
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    module = linen.vmap(linen.MultiHeadDotProductAttention, **axes)(N)
    one = of_linen()[1]
    variables = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), one)
    with pytest.raises(ValueError, match=r"linen.vmap runs the layers of a stack") as refused:
        flax.from_module(module, variables)
    call = str(refused.value).partition("take the stack by ")[2].partition(", and one")[0]
    names = {"import_params": flax.import_params, "tensors_of": flax.tensors_of}
    names |= {"module": module, "variables": variables}
    stack, _ = eval(call.replace("...", str(N)), names)
    first = str(refused.value).partition("of it by ")[2]
    params = eval(first, {"jax": jax, "params": stack})
    expected = flax.from_module(of_linen()[0], one)
    jax.tree.map(np.testing.assert_array_equal, params, expected[0])
    with pytest.raises(ValueError, match="compare its weights as a flat dict of arrays"):
        compare((module, variables), variables)
    assert compare(flax.tensors_of(module, variables).state, variables, num_heads=N)
    shared = linen.vmap(linen.MultiHeadDotProductAttention, **axes | {"variable_axes": {}})(N)
    with pytest.raises(ValueError, match="has a __call__ of its own"):
        flax.from_module(shared, one)
