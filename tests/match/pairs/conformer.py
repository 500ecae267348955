"""A conformer block in torch, and in nnx."""

# mypy: ignore-errors
import jax
import torch
from flax import nnx
from torch.nn.functional import glu, silu

from tests.match.pairs.base import Pair, floats

D, N = 16, 2


class FeedForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_norm = torch.nn.LayerNorm(D)
        self.linear1, self.linear2 = torch.nn.Linear(D, 3 * D), torch.nn.Linear(3 * D, D)

    def forward(self, x):
        return self.linear2(silu(self.linear1(self.layer_norm(x))))


class ConformerBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ffn1, self.ffn2 = FeedForward(), FeedForward()
        self.self_attn_layer_norm = torch.nn.LayerNorm(D)
        self.self_attn = torch.nn.MultiheadAttention(D, N, batch_first=True)
        self.conv_norm = torch.nn.LayerNorm(D)
        self.pointwise_conv1 = torch.nn.Conv1d(D, 2 * D, 1, bias=False)
        self.depthwise_conv = torch.nn.Conv1d(D, D, 3, padding=1, groups=D, bias=False)
        self.pointwise_conv2 = torch.nn.Conv1d(D, D, 1, bias=False)
        self.final_layer_norm = torch.nn.LayerNorm(D)

    def forward(self, x):
        x = x + 0.5 * self.ffn1(x)
        y = self.self_attn_layer_norm(x)
        x = x + self.self_attn(y, y, y, need_weights=False)[0]
        y = glu(self.pointwise_conv1(self.conv_norm(x).transpose(1, 2)), 1)
        x = x + self.pointwise_conv2(silu(self.depthwise_conv(y))).transpose(1, 2)
        return self.final_layer_norm(x + 0.5 * self.ffn2(x))


class TorchConformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([ConformerBlock() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class FFN(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.up, self.down = nnx.Linear(D, 3 * D, rngs=rngs), nnx.Linear(3 * D, D, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.up(self.norm(x))))


class Block(nnx.Module):
    def __init__(self, rngs):
        ln = lambda: nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        conv = lambda o, k, g=1: nnx.Conv(
            D, o, (k,), feature_group_count=g, use_bias=False, rngs=rngs
        )
        self.ff_first, self.ff_second = FFN(rngs), FFN(rngs)
        self.attn_norm, self.conv_norm, self.out_norm = ln(), ln(), ln()
        self.attn = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
        self.conv_in, self.conv_depth, self.conv_out = conv(2 * D, 1), conv(D, 3, D), conv(D, 1)

    def __call__(self, x):
        x = x + 0.5 * self.ff_first(x)
        x = x + self.attn(self.attn_norm(x))
        y = self.conv_in(self.conv_norm(x))
        y = y[..., :D] * jax.nn.sigmoid(y[..., D:])
        x = x + self.conv_out(jax.nn.silu(self.conv_depth(y)))
        return self.out_norm(x + 0.5 * self.ff_second(x))


class Conformer(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


PAIR = Pair(TorchConformer, lambda: Conformer(nnx.Rngs(0)), floats(2, 9, D))
