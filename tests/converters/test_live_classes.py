"""Every layout against the live class it is of: as exact as the class itself, over random weights.

The classes of transformers are built from small configurations. Classes of the documents that the
project grew from are written out here as they stand there, on the framework's own layers.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import keras as library
import numpy as np
import pytest
import torch
import transformers as t
from keras import ops
from torch import nn

from jaxmha import multi_head_attention
from jaxmha.converters import keras
from jaxmha.converters.discovery import attention_blocks, families
from jaxmha.converters.layout import registry, transform
from jaxmha.converters.layout.arrays import NDArray, to_numpy, to_torch
from jaxmha.converters.layout.by_hand import BY_HAND
from jaxmha.converters.verify import oracle
from tests.promotion import foreign
from tests.zoo import other_results

B, T, N, K, H = 2, 43, 6, 3, 10
D = N * H
# Of each class, and of masks; together they are over 200 configurations.
DRAWS = 12
MEAN, WORST = 1.0, 2.0
OPTIMISED = True  # compiled as users compile it
CAUSAL = np.tri(T, dtype=bool)[None, None]
ADDED = np.where(CAUSAL, 0.0, -np.inf).astype(np.float32)

Call = Callable[[NDArray, NDArray | None], Any]


class Live(NamedTuple):
    """A layer of another library: its arrays by key, and how it is called on `(B, T, D)`."""

    state: dict[str, Any]
    call: Call


def randomised(module: Any, seed: int) -> Any:
    """A torch module with every parameter drawn anew, biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            deviation = parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
    return module.eval()


def of_torch(module: Any, seed: int, mask: str = "", state: Any = None, **arguments: Any) -> Live:
    """A torch module; `mask` names its additive mask, empty where it takes none."""
    module = randomised(module, seed)

    def call(x: NDArray, allowed: NDArray | None) -> NDArray:
        masks = {mask: None if allowed is None else to_torch(ADDED)} if mask else {}
        with torch.no_grad():
            out = module(to_torch(x), **masks, **arguments)
        return to_numpy(out[0] if isinstance(out, tuple) else out)

    return Live(module.state_dict() if state is None else state(module), call)


def of_transformers(name: str, seed: int) -> Live:
    """A class of transformers with its own arguments."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    some = {"hidden_size": D, "num_attention_heads": N, "attn_implementation": "eager"}
    unturned = torch.ones(B, T, H), torch.zeros(B, T, H)  # a rotation by nothing
    grouped = {"num_key_value_heads": K, "head_dim": H}
    made: dict[str, Callable[[], Live]] = {
        "gpt2": lambda: of_torch(
            GPT2Attention(
                t.GPT2Config(n_embd=D, n_head=N, attn_implementation="eager"), layer_idx=0
            ),
            seed,
            "attention_mask",
        ),
        "llama": lambda: of_torch(
            LlamaAttention(t.LlamaConfig(**some, **grouped), layer_idx=0),
            seed,
            "attention_mask",
            position_embeddings=unturned,
        ),
        "gpt-neox": lambda: of_torch(
            GPTNeoXAttention(t.GPTNeoXConfig(**some), layer_idx=0),
            seed,
            "attention_mask",
            position_embeddings=unturned,
        ),
    }
    return made[name]()


def of_document(name: str, seed: int) -> Live:
    """The PyTorch classes: four linear layers by name, in a list, or three bare matrices."""

    class Attention(nn.Module):
        linears: Any

        def __init__(self) -> None:
            super().__init__()
            if name == "linear":
                self.q_proj, self.k_proj, self.v_proj, self.out_proj = self.made(4)
            elif name == "annotated":
                self.linears = nn.ModuleList(self.made(4))
            else:
                self.linears = nn.ParameterList([nn.Parameter(torch.rand(D, D)) for _ in range(3)])

        def made(self, count: int) -> list[nn.Linear]:
            return [nn.Linear(D, D) for _ in range(count)]

        def forward(self, x: Any, mask: Any = None) -> Any:
            first = (
                (self.q_proj, self.k_proj, self.v_proj) if name == "linear" else self.linears[:3]
            )
            applied = (x @ f if name == "matrices" else f(x) for f in first)
            q, k, v = (y.view(B, T, N, H).transpose(1, 2) for y in applied)
            logits = torch.matmul(q, k.transpose(-2, -1)) / H**0.5
            if mask is not None:
                logits = logits.masked_fill(mask < 0, -1e9)
            y = torch.matmul(torch.softmax(logits, dim=-1), v)
            y = y.transpose(1, 2).contiguous().view(B, T, D)
            if name == "matrices":
                return y
            return self.out_proj(y) if name == "linear" else self.linears[-1](y)

    return of_torch(Attention(), seed, "mask")


@cache
def dense() -> Any:
    """The Keras class: four Dense layers, whose mask is True where nothing is attended."""

    class Attention(library.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                setattr(self, name, library.layers.Dense(D, name=name))

        def build(self, shape: Any) -> None:
            for layer in self._layers:
                layer.build(shape)

        def call(self, x: Any, mask: Any = None) -> Any:
            q, k, v = (
                ops.transpose(ops.reshape(f(x), (B, T, N, H)), (0, 2, 1, 3))
                for f in (self.q_proj, self.k_proj, self.v_proj)
            )
            logits = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / ops.sqrt(
                ops.cast(H, "float32")
            )
            if mask is not None:
                logits = logits + ops.expand_dims(ops.cast(mask, "float32") * -1e9, 1)
            y = ops.matmul(ops.softmax(logits, axis=-1), v)
            return self.out_proj(ops.reshape(ops.transpose(y, (0, 2, 1, 3)), (B, T, D)))

    layer = Attention()
    layer.build((B, T, D))
    return layer


def of_dense(seed: int) -> Live:
    layer = dense()
    return of_keras(layer, seed, lambda x, mask: layer(x, mask=None if mask is None else ~mask[0]))


@cache
def grouped() -> Any:
    """Keras' own layer with fewer key and value heads."""
    layer = library.layers.GroupQueryAttention(H, N, K)
    layer.build((None, None, D), (None, None, D), (None, None, D))
    return layer


def of_grouped(seed: int) -> Live:
    return of_keras(grouped(), seed, lambda x, mask: keras.forward(grouped(), x, x, x, mask))


def of_keras(layer: Any, seed: int, call: Call) -> Live:
    """A Keras layer with every variable drawn anew."""
    rng = np.random.default_rng(seed)
    for variable in layer.weights:
        variable.assign(rng.normal(size=variable.shape) * D**-0.5)
    return Live({"/".join(w.path.split("/")[-2:]): to_numpy(w) for w in layer.weights}, call)


@cache
def jitted_equinox() -> Any:
    """The layer on every row of a batch."""
    return eqx.filter_jit(
        lambda layer, x, mask: jax.vmap(lambda row: layer(row, row, row, mask=mask))(x)
    )


def of_equinox(seed: int) -> Live:
    """Any of its biases may be there."""
    names = ("query", "key", "value", "output")
    biases = {f"use_{name}_bias": seed % 2 == 0 or name in "query value" for name in names}
    layer = eqx.nn.MultiheadAttention(N, D, key=jax.random.key(seed), **biases)
    state = {
        f"{name}_proj.{part}": array
        for name in names
        for part in ("weight", "bias")
        if (array := getattr(getattr(layer, f"{name}_proj"), part)) is not None
    }

    def call(x: NDArray, mask: NDArray | None) -> NDArray:
        return to_numpy(jitted_equinox()(layer, x, None if mask is None else mask[0, 0]))

    return Live(state, call)


@cache
def haiku() -> tuple[Any, Any]:
    """Functions that make the parameters, and apply them."""
    import haiku as hk

    init = hk.initializers.RandomNormal(D**-0.5)
    layer = hk.transform(
        lambda x, mask: hk.MultiHeadAttention(N, H, w_init=init, b_init=init, name="mha")(
            x, x, x, mask=mask
        )
    )
    return layer.init, jax.jit(layer.apply)


def of_keyless(seed: int) -> Live:
    """Attention as BEiT in timm has it: packed, with biases of queries and values alone."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = torch.nn.Linear(D, 3 * D, bias=False), torch.nn.Linear(D, D)
            self.q_bias, self.v_bias = (torch.nn.Parameter(torch.zeros(D)) for _ in range(2))

        def forward(self, x: Any) -> Any:
            bias = torch.cat([self.q_bias, torch.zeros(D), self.v_bias])
            packed = torch.nn.functional.linear(x, self.qkv.weight, bias)
            heads = packed.reshape(B, T, 3, N, H).permute(2, 0, 3, 1, 4)
            out = torch.nn.functional.scaled_dot_product_attention(*heads)
            return self.proj(out.transpose(1, 2).reshape(B, T, D))

    def drawn_state(module: Any) -> Any:
        with torch.no_grad():
            for bias in (module.q_bias, module.v_bias):
                bias.copy_(torch.linspace(-1, 1, D).roll(seed))
        return module.state_dict()

    return of_torch(Attention(), seed, state=drawn_state)


def of_haiku(seed: int) -> Live:
    init, apply = haiku()
    tree = init(jax.random.key(seed), np.zeros((B, T, D), np.float32), None)
    state = {
        f"{module.removeprefix('mha/')}/{name}": array
        for module, part in tree.items()
        for name, array in part.items()
    }
    return Live(state, lambda x, mask: apply(tree, None, x, mask))


TRANSFORMERS = ("gpt2", "llama", "gpt-neox")  # the zoo compares every model type
UNMASKED = {"timm-keyless"}  # its class takes no mask
# Name of the class -> its layout, and how it is made from a seed.
LIVE: dict[str, tuple[str, Callable[[int], Live]]] = {
    **{f"transformers {x}": (x, partial(of_transformers, x)) for x in TRANSFORMERS},
    **{f"document {x}": (x, partial(of_document, x)) for x in ("linear", "annotated", "matrices")},
    "document dense": ("dense", of_dense),
    "keras grouped": ("keras-gqa", of_grouped),
    "equinox": ("equinox", of_equinox),
    "haiku": ("haiku", of_haiku),
    "timm keyless": ("timm-keyless", of_keyless),
}


def measured(name: str) -> Iterator[tuple[float, float]]:
    """Ratios of our errors to the class's, RMS and largest, for every draw and mask."""
    layout, make = LIVE[name]
    num_heads = None if layout == "keras-gqa" else N
    for seed in range(DRAWS):
        with foreign():
            live = make(seed)
        params, semantics = transform.import_params(
            [attention_blocks.named(layout)], live.state, num_heads=num_heads
        )
        x = np.random.default_rng([seed, 1]).normal(size=(B, T, D)).astype(np.float32)
        for mask in (None,) if layout in UNMASKED else (None, CAUSAL):
            with foreign():
                theirs = to_numpy(live.call(x, mask))
            full = np.ones_like(CAUSAL) if mask is None else mask  # compiled once
            exact = oracle.run(params, semantics, x, x, x, mask=mask).output
            ours = np.asarray(multi_head_attention(params, x, mask=full, semantics=semantics))
            a, b = (np.abs(out.astype(np.float64) - exact) for out in (ours, theirs))
            assert b.max() < 1e-5 * np.abs(exact).max(), "another function"
            yield float(np.sqrt(np.mean(a**2) / np.mean(b**2))), float(a.max() / b.max())


@pytest.mark.slow_variants("*", "!transformers llama", "!transformers gpt-neox")
@pytest.mark.filterwarnings("default")  # the libraries' own
@pytest.mark.parametrize("name", LIVE)
def test_no_less_exact_than_the_class(name: str) -> None:
    rms, largest = (np.array(ratios) for ratios in zip(*measured(name), strict=True))
    mean = float(np.exp(np.mean(np.log(rms))))
    print(f"{name}: mean {mean:.3f}, worst {largest.max():.2f}")
    assert mean <= MEAN, f"{mean:.3f}"
    assert largest.max() <= WORST, f"{largest.max():.2f}"


# Layouts of other libraries, and a model of each that tests/zoo runs.
OF_OTHERS = {
    "timm-heads": "timm/maxvit_rmlp_pico_rw_256",
    "timm-heads-conv": "timm/coatnet_nano_rw_224",
    "timm-nest": "timm/nest_tiny",
    "x-transformers": "x_transformers/Encoder (kv heads)",
    "litgpt-norm-heads": "litgpt/OLMo-2-1124-7B",
    "litgpt-norm": "litgpt/Qwen3-0.6B",
}


def test_every_layout_has_a_live_class() -> None:
    """Classes of torch, Keras and Flax themselves are measured with all their settings elsewhere."""
    elsewhere = {"torch", "torch-separate", "keras", "flax"}
    files = {"keras-file", "keras-gqa-file", "dense-file"}  # the same arrays under other keys
    layouts = {layout.name for layout in registry.LAYOUTS}
    by_hand = {layout.name for layout in BY_HAND}  # test_by_hand.py has a class of each
    # tests/zoo runs models of these; `jaxmha` is parameters as they are.
    right = [one.layouts for one in families.checked() if one.verdict == "right"]
    zoo = {name for names in right for name in names.split(", ")}
    zoo |= {"llama-norm-gate-bias"}  # Beam: equal but for the position that scales its queries
    zoo |= {"molmo"}  # phi3 under other names
    # Blocks that ran right in models of which other blocks are carried, or did not run.
    zoo |= {"lw-detr", "cosmos"}
    # test_choices.py has the class of the last, and the splits of classes that are in no package here.
    zoo |= {"chatglm", "megatron", "starcoder-heads"}
    rest = layouts - elsewhere - files - by_hand - zoo - {"jaxmha"} - OF_OTHERS.keys()
    assert {other_results.expected()[model] for model in OF_OTHERS.values()} == {"right"}
    assert rest <= {layout for layout, _ in LIVE.values()}
    count = sum(DRAWS * (1 if layout in UNMASKED else 2) for layout, _ in LIVE.values())
    assert count >= 200
