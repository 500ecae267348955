"""torch.nn.TransformerEncoder, and a linen encoder."""

# mypy: ignore-errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import torch

from tests.match.pairs.base import Pair, floats


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.MultiHeadDotProductAttention(4, name="attention")(x, x)
        x = nn.LayerNorm(1e-5, name="attention_norm")(x + y)
        y = nn.Dense(48, name="ffn_in")(x)
        y = nn.Dense(24, name="ffn_out")(jax.nn.relu(y))
        return nn.LayerNorm(1e-5, name="ffn_norm")(x + y)


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = Block(name=f"block_{i}")(x)
        return x


def source():
    layer = torch.nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def target():
    model = Encoder()
    return model, model.init(jax.random.key(0), jnp.zeros((1, 5, 24)))


def run_target(pair, x):
    return pair[0].apply(pair[1], x)


PAIR = Pair(source, target, floats(2, 5, 24), run_target=run_target)
