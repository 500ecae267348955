"""The same encoder of three blocks in torch, nnx and, with automatic names, Keras.

The Keras modules name no layer: its layers are called `dense`, `dense_1`, ...
"""

# mypy: ignore-errors
import keras
import numpy as np
import torch
from flax import linen, nnx
from keras import layers as kl

TOKENS, D, N, F, CLASSES, BLOCKS = 17, 22, 2, 13, 5, 3
EPSILON = 1e-5
IDS = np.random.default_rng(0).integers(0, TOKENS, (3, 7)).astype(np.int32)


class OfTorch(torch.nn.Module):
    def __init__(self, pre=True, final=True, embed_norm=False):
        super().__init__()
        self.embed = torch.nn.Embedding(TOKENS, D)
        self.embed_norm = torch.nn.LayerNorm(D) if embed_norm else None
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(D, N, F, 0.0, batch_first=True, norm_first=pre)
            for _ in range(BLOCKS)
        )
        self.norm = torch.nn.LayerNorm(D) if final else None
        self.head = torch.nn.Linear(D, CLASSES)
        self.eval()
        with torch.no_grad():
            for number, one in enumerate(self.parameters()):  # no two arrays are alike
                drawn = np.random.default_rng(number).normal(0.1, 0.3, one.shape)
                one.copy_(torch.as_tensor(drawn))

    def forward(self, ids):
        x = self.embed(ids)
        x = self.embed_norm(x) if self.embed_norm else x
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) if self.norm else x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.attn = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
        self.norm1 = nnx.LayerNorm(D, epsilon=EPSILON, rngs=rngs)
        self.norm2 = nnx.LayerNorm(D, epsilon=EPSILON, rngs=rngs)
        self.up, self.down = nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(nnx.relu(self.up(self.norm2(x))))


class OfNnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(TOKENS, D, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(BLOCKS)])
        self.norm = nnx.LayerNorm(D, epsilon=EPSILON, rngs=rngs)
        self.head = nnx.Linear(D, CLASSES, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        norm = linen.LayerNorm(epsilon=EPSILON)
        x = x + linen.MultiHeadDotProductAttention(N)(norm(x))
        up = linen.relu(linen.Dense(F)(linen.LayerNorm(epsilon=EPSILON)(x)))
        return x + linen.Dense(D)(up)


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, ids):
        x = linen.Embed(TOKENS, D)(ids)
        for _ in range(BLOCKS):
            x = LinenBlock()(x)
        return linen.Dense(CLASSES)(linen.LayerNorm(epsilon=EPSILON)(x))


def norm():
    return kl.LayerNormalization(epsilon=EPSILON)


@keras.saving.register_keras_serializable("jaxmha")
class Block(kl.Layer):
    """One block; its layers are `dense_4` etc. in variable paths, and attributes in files."""

    def __init__(self, **options):
        super().__init__(**options)
        self.attention, self.norm1, self.norm2 = attention(), norm(), norm()
        self.up, self.down = kl.Dense(F, activation="relu"), kl.Dense(D)

    def build(self, shape):
        for one in (self.norm1, self.norm2, self.up):
            one.build(shape)
        self.attention.build(shape, shape)
        self.down.build((*shape[:-1], F))

    def call(self, x):
        inner = self.norm1(x)
        x = x + self.attention(inner, inner)
        return x + self.down(self.up(self.norm2(x)))


def attention():
    return kl.MultiHeadAttention(N, D // N)


def flat_block(x, pre):
    """The layers of a block on a symbolic tensor."""
    inner = norm()(x) if pre else x
    x = x + attention()(inner, inner)
    x = x if pre else norm()(x)
    inner = norm()(x) if pre else x
    x = x + kl.Dense(D)(kl.Dense(F, activation="relu")(inner))
    return x if pre else norm()(x)


def parallel_block(x):
    """Attention and MLP read the same input, and Keras numbers the norm of the MLP first."""
    inner = norm()(x)
    return x + attention()(inner, inner) + kl.Dense(D)(kl.Dense(F, activation="relu")(norm()(x)))


def functional(block, *, final=True, embed_norm=False):
    ids = keras.Input((IDS.shape[1],), dtype="int32")
    x = kl.Embedding(TOKENS, D)(ids)
    x = norm()(x) if embed_norm else x
    for _ in range(BLOCKS):
        x = block(x)
    return keras.Model(ids, kl.Dense(CLASSES)(norm()(x) if final else x))


def model_of_block(block):
    x = keras.Input((IDS.shape[1], D))
    return keras.Model(x, block(x))


def pre_norm(x):
    return flat_block(x, pre=True)


def experts(count):
    """Blocks on the same input, without biases."""
    x = keras.Input((3,))
    rows = [(kl.Dense(5, use_bias=False), kl.Dense(3, use_bias=False)) for _ in range(count)]
    blocks = [keras.Sequential([keras.Input((3,)), *layers]) for layers in rows]
    return keras.Model(x, kl.Add()([one(x) for one in blocks]))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = kl.Embedding(TOKENS, D), norm(), kl.Dense(CLASSES)
        self.blocks = [Block() for _ in range(BLOCKS)]

    def call(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def subclassed():
    made = Subclassed()
    made(IDS)
    return made


def sequential():
    blocks = [Block() for _ in range(BLOCKS)]
    first = [keras.Input((IDS.shape[1],), dtype="int32"), kl.Embedding(TOKENS, D)]
    return keras.Sequential([*first, *blocks, norm(), kl.Dense(CLASSES)])


def counted_before():
    """Other models were built before, so that names start with other numbers."""
    for one in (kl.Dense(2), kl.Dense(2), norm(), *(attention() for _ in range(7))):
        del one
    return functional(pre_norm)


# Each of these computes what `OfTorch()` computes.
KERAS = {
    "functional": counted_before,
    "functional_of_layers": lambda: functional(lambda x: Block()(x)),
    "nested": lambda: functional(lambda x: model_of_block(pre_norm)(x)),
    "sequential": sequential,
    "subclassed": subclassed,
}


def drawn(model):
    """The model with arrays of which no two are alike."""
    rng = np.random.default_rng(1)
    for one in model.weights:
        one.assign(rng.normal(0.1, 0.3, one.shape))
    return model


def of_linen():
    import jax

    module = OfLinen()
    return module, module.init(jax.random.key(0), IDS)
