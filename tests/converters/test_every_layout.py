"""Every layout of every module: round trip, and the same outputs as the framework's live layer.

Where a class of another library stands behind a layout it is built from a small configuration,
with random weights, and called itself.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxmha import MHAParams, Semantics, multi_head_attention, project
from jaxmha.attention import dot_product_attention
from jaxmha.converters import blocks, engine, equinox, haiku, huggingface, keras, linear, oracle
from jaxmha.converters.arrays import NDArray, to_numpy, to_torch
from jaxmha.converters.layout import Layout
from jaxmha.layer import combine
from jaxmha.params import CANONICAL, from_leaves, leaves
from jaxmha.rotary import rope
from tests.converters.layers import foreign

B, T, N, K, H = 2, 11, 6, 3, 4
D = N * H
EVERY = pytest.mark.parametrize("layout", blocks.LAYOUTS, ids=lambda layout: layout.name)


def params_of(layout: Layout, lead: tuple[int, ...] = (), seed: int = 0) -> MHAParams:
    """Random leaves of every kind that the layout has, of sizes that it can hold."""
    free = {"Dq": 13, "Dk": 17, "Dv": 19, "Do": 23, "N": N, "K": K, "H": H, "h": 5}
    for letter, (tied, _) in layout.ties.items():
        free[letter] = int(np.prod([free[a] for a in tied.split()]))
    for letter, (tied, _) in layout.ties.items():  # ties of ties
        free[letter] = int(np.prod([free[a] for a in tied.split()]))
    rng = np.random.default_rng(seed)
    held = {leaf for entry in layout.entries for leaf in entry.leaves}
    shapes = {
        leaf: [free[a] for a in CANONICAL[leaf].split()] for leaf in CANONICAL if leaf in held
    }
    arrays: dict[str, Any] = {
        leaf: rng.normal(size=(*lead, *shape)).astype(np.float32) for leaf, shape in shapes.items()
    }
    return from_leaves(arrays)


@EVERY
@pytest.mark.parametrize("lead", [(), (3,)], ids=["single", "stacked"])
def test_round_trip(layout: Layout, lead: tuple[int, ...]) -> None:
    params = params_of(layout, lead)
    state = engine.export_params(layout, params, layout.semantics, prefix="a")
    again, semantics = engine.import_params([layout], state, num_heads=N, prefix="a")
    assert semantics == layout.semantics
    for (name, x), y in zip(leaves(params).items(), leaves(again).values(), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)
    back = engine.export_params(layout, again, layout.semantics, prefix="a")
    assert all(back[key].tobytes() == array.tobytes() for key, array in state.items())


@EVERY
def test_is_found_in_a_file(layout: Layout) -> None:
    state = engine.export_params(layout, params_of(layout), layout.semantics, prefix="x")
    found = blocks.find({"other": (2, 3)} | {key: array.shape for key, array in state.items()})
    assert [(block.prefix, block.layout.name) for block in found] == [("x", layout.name)]


@EVERY
def test_is_small(layout: Layout) -> None:
    assert len(layout.entries) <= 15
    assert layout.about


def agree(
    params: MHAParams, semantics: Semantics, x: NDArray, theirs: NDArray, **masks: Any
) -> None:
    """Ours is within twice the framework's own error against float64 (and both are small)."""
    mask = masks.get("mask")
    exact = oracle.run(params, semantics, x, x, x, mask=mask).output
    ours = np.asarray(multi_head_attention(params, x, semantics=semantics, **masks))
    errors = [float(np.sqrt(np.mean(np.square(y - exact)))) for y in (ours, theirs)]
    scale = float(np.sqrt(np.mean(np.square(exact))))
    assert errors[1] <= 1e-5 * scale, f"not the same function: {errors[1] / scale:.2g}"
    assert errors[0] <= 2 * errors[1] + 1e-9


def inputs(width: int = D, seed: int = 0) -> NDArray:
    return np.random.default_rng(seed).normal(size=(B, T, width)).astype(np.float32)


def randomised(module: Any, seed: int = 0) -> Any:
    """A torch module with every parameter drawn anew, biases too."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            spread = parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return module.eval()


CAUSAL = np.tri(T, dtype=bool)[None, None]
ADDITIVE = np.where(CAUSAL, 0.0, -np.inf).astype(np.float32)


def hugging_face() -> dict[str, Callable[[], tuple[MHAParams, Semantics, NDArray, dict[str, Any]]]]:
    """Layout -> imports and calls transformers' own class: params, semantics, output, masks."""
    import torch
    import transformers as t
    from transformers.models.bert.modeling_bert import BertAttention
    from transformers.models.clip.modeling_clip import CLIPAttention
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
    from transformers.models.llama.modeling_llama import LlamaAttention
    from transformers.models.t5.modeling_t5 import T5LayerSelfAttention

    eager = {"attn_implementation": "eager"}
    x = to_torch(inputs())

    def run(module: Any, converter: Any, layout: str, *args: Any, **kwargs: Any) -> Any:
        state = module.state_dict()
        params, semantics = converter.import_params(state, layout=layout, num_heads=N)
        with torch.no_grad():
            out = module(x, *args, **kwargs)
        return params, semantics, to_numpy(out[0] if isinstance(out, tuple) else out)

    def bert() -> Any:
        config = t.BertConfig(hidden_size=D, num_attention_heads=N, **eager)
        module = randomised(BertAttention(config))
        module.output.dense.register_forward_hook(lambda _, __, out: seen.append(out))
        seen: list[Any] = []
        params, semantics, _ = run(module, huggingface, "bert")
        return params, semantics, to_numpy(seen[0]), {}

    def clip() -> Any:
        config = t.CLIPVisionConfig(hidden_size=D, num_attention_heads=N, **eager)
        return *run(randomised(CLIPAttention(config)), linear, "linear"), {}

    def gpt2() -> Any:
        config = t.GPT2Config(n_embd=D, n_head=N, **eager)
        module = randomised(GPT2Attention(config, layer_idx=0))
        result = run(module, huggingface, "gpt2", attention_mask=to_torch(ADDITIVE))
        return *result, {"mask": CAUSAL}

    def t5() -> Any:
        config = t.T5Config(d_model=D, num_heads=N, d_kv=7, is_decoder=False)
        module = randomised(T5LayerSelfAttention(config, layer_idx=0).SelfAttention)
        return *run(module, huggingface, "t5"), {}

    def llama() -> Any:
        config = t.LlamaConfig(
            hidden_size=D, num_attention_heads=N, num_key_value_heads=K, head_dim=H, **eager
        )
        module = randomised(LlamaAttention(config, layer_idx=0))
        still = torch.ones(B, T, H), torch.zeros(B, T, H)  # no rotation
        return *run(module, linear, "llama", position_embeddings=still, attention_mask=None), {}

    return {"bert": bert, "clip": clip, "gpt2": gpt2, "t5": t5, "llama": llama}


@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize("name", ["bert", "clip", "gpt2", "t5", "llama"])
def test_transformers(name: str) -> None:
    params, semantics, theirs, masks = hugging_face()[name]()
    agree(params, semantics, inputs(), theirs, **masks)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_llama_with_rotary_embedding(base: float) -> None:
    import torch
    import transformers as t
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = t.LlamaConfig(
        hidden_size=D,
        num_attention_heads=N,
        num_key_value_heads=K,
        head_dim=H,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    module, x = randomised(LlamaAttention(config, layer_idx=0)), inputs()
    positions = np.broadcast_to(np.arange(T, dtype=np.int32) + 5, (B, T)).copy()
    with torch.no_grad():
        angles = LlamaRotaryEmbedding(config)(to_torch(x), to_torch(positions))
        mask = to_torch(ADDITIVE)
        theirs = module(to_torch(x), position_embeddings=angles, attention_mask=mask)[0].numpy()
    params, _ = linear.import_params(module.state_dict(), layout="llama", num_heads=N)
    q, k, v = project(params, x)
    q, k = (rope(heads, positions, base=base) for heads in (q, k))
    ours = combine(params, dot_product_attention(q, k, v, is_causal=True))
    np.testing.assert_allclose(ours, theirs, atol=3e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("biases", [(False,) * 4, (True,) * 4, (True, False, True, False)])
def test_equinox(biases: tuple[bool, ...]) -> None:
    import equinox as eqx

    use = dict(zip(("query", "key", "value", "output"), biases, strict=True))
    flags = {f"use_{name}_bias": flag for name, flag in use.items()}
    key = jax.random.key(0)
    with foreign():
        layer = eqx.nn.MultiheadAttention(
            N, D, qk_size=5, vo_size=7, output_size=9, key=key, **flags
        )
        x = inputs()
        theirs = jax.vmap(lambda row: layer(row, row, row))(x)
    state = {
        f"{name}_proj.{part}": array
        for name in use
        for part in ("weight", "bias")
        if (array := getattr(getattr(layer, f"{name}_proj"), part)) is not None
    }
    params, semantics = equinox.import_params(state, num_heads=N)
    agree(params, semantics, x, np.asarray(theirs))


def test_haiku() -> None:
    import haiku as hk

    x = inputs()
    init = hk.initializers.RandomNormal(0.3)
    layer = hk.transform(
        lambda x: hk.MultiHeadAttention(
            N, 5, w_init=init, b_init=init, value_size=7, model_size=9, name="mha"
        )(x, x, x)
    )
    with foreign():
        tree = layer.init(jax.random.key(0), x)
        theirs = layer.apply(tree, None, x)
    state = {f"{module}/{name}": w for module, part in tree.items() for name, w in part.items()}
    params, semantics = haiku.import_params(state, num_heads=N, prefix="mha")
    agree(params, semantics, x, np.asarray(theirs))


@pytest.mark.parametrize("use_bias", [True, False])
def test_keras_grouped(use_bias: bool) -> None:
    import keras as library

    x = inputs(13)
    with foreign():
        layer = library.layers.GroupQueryAttention(H, N, K, use_bias=use_bias)
        layer.build((None, None, 13), (None, None, 13), (None, None, 13))
        rng = np.random.default_rng(0)
        for weight in layer.weights:
            weight.assign(rng.normal(size=weight.shape) * 0.3)
        params, semantics = keras.from_module(layer)
        mask = np.arange(T) < np.array([11, 7])[:, None]
        theirs = keras.forward(layer, x, x, x, mask[:, None, None])
        again, _ = keras.from_module(keras.to_module(params, semantics))
    agree(params, semantics, x, theirs, mask=mask[:, None, None])
    for (name, a), b in zip(leaves(params).items(), leaves(again).values(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


class SeparateLinear:
    """Attention of four linear layers written from its description, in NumPy float64."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.weights = [rng.normal(size=(D, D)) * D**-0.5 for _ in range(4)]
        self.biases = [rng.normal(size=D) for _ in range(4)]

    def __call__(self, x: NDArray, out: bool = True, bias: bool = True) -> NDArray:
        def heads(i: int) -> NDArray:
            y = x @ self.weights[i] + (self.biases[i] if bias else 0)
            split: NDArray = y.reshape(B, T, N, H).transpose(0, 2, 1, 3)
            return split

        q, k, v = (heads(i) for i in range(3))
        logits = q @ k.swapaxes(-1, -2) / H**0.5
        p = np.exp(logits - logits.max(-1, keepdims=True))
        y: NDArray = (p / p.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(B, T, D)
        return y @ self.weights[3] + self.biases[3] if out else y


WRITTEN: dict[str, Callable[[SeparateLinear], dict[str, NDArray]]] = {
    "linear": lambda a: {
        f"{n}_proj.{p}": w
        for n, m, b in zip(("q", "k", "v", "out"), a.weights, a.biases, strict=True)
        for p, w in (("weight", m.T), ("bias", b))
    },
    "dense": lambda a: {
        f"{n}_proj/{p}": w
        for n, m, b in zip(("q", "k", "v", "out"), a.weights, a.biases, strict=True)
        for p, w in (("kernel", m), ("bias", b))
    },
    "annotated": lambda a: {
        f"linears.{i}.{p}": w
        for i, (m, b) in enumerate(zip(a.weights, a.biases, strict=True))
        for p, w in (("weight", m.T), ("bias", b))
    },
    "vit": lambda a: {
        f"{n}.{p}": w
        for n, m, b in zip(
            ("attention.query", "attention.key", "attention.value", "output.dense"),
            a.weights,
            a.biases,
            strict=True,
        )
        for p, w in (("weight", m.T), ("bias", b))
    },
    "timm": lambda a: {
        "qkv.weight": np.concatenate([m.T for m in a.weights[:3]]),
        "qkv.bias": np.concatenate(a.biases[:3]),
        "proj.weight": a.weights[3].T,
        "proj.bias": a.biases[3],
    },
    "gpt-neox": lambda a: {  # head by head: row (n, qkv, h)
        "query_key_value.weight": np.stack(
            [m.T.reshape(N, H, D) for m in a.weights[:3]], 1
        ).reshape(3 * D, D),
        "query_key_value.bias": np.stack([b.reshape(N, H) for b in a.biases[:3]], 1).ravel(),
        "dense.weight": a.weights[3].T,
        "dense.bias": a.biases[3],
    },
    "matrices": lambda a: {f"linears.{i}": m for i, m in enumerate(a.weights[:3])},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_from_documentation(name: str) -> None:
    """These classes are not installed: the layout is checked against its own formulas."""
    attention, x = SeparateLinear(), inputs().astype(np.float64)
    layout = blocks.named(name)
    params, semantics = engine.import_params([layout], WRITTEN[name](attention), num_heads=N)
    plain = name == "matrices"
    expected = attention(x, out=not plain, bias=not plain)
    found = oracle.run(params, semantics, x, x, x).output
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
