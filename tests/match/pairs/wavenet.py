"""Gated dilated convolutions over time in torch, and in nnx."""

# mypy: ignore-errors
import jax
import jax.numpy as jnp
import torch
from flax import nnx

from tests.match.pairs.base import Pair, floats

C = 8


class Residual(torch.nn.Module):
    def __init__(self, d):
        super().__init__()
        self.filter_conv = torch.nn.Conv1d(C, C, 3, padding=d, dilation=d)
        self.gate_conv = torch.nn.Conv1d(C, C, 3, padding=d, dilation=d)
        self.res_conv, self.skip_conv = torch.nn.Conv1d(C, C, 1), torch.nn.Conv1d(C, 12, 1)

    def forward(self, x):
        y = torch.tanh(self.filter_conv(x)) * torch.sigmoid(self.gate_conv(x))
        return x + self.res_conv(y), self.skip_conv(y)


class WaveNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.start_conv = torch.nn.Conv1d(1, C, 1)
        self.layers = torch.nn.ModuleList([Residual(2**i) for i in range(3)])
        self.end_conv_1, self.end_conv_2 = torch.nn.Conv1d(12, 12, 1), torch.nn.Conv1d(12, 5, 1)

    def forward(self, x):
        x, total = self.start_conv(x.transpose(1, 2)), 0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        y = self.end_conv_2(torch.relu(self.end_conv_1(torch.relu(total))))
        return y.transpose(1, 2)


class Block(nnx.Module):
    def __init__(self, d, rngs):
        conv = lambda k, o, d=1: nnx.Conv(C, o, (k,), kernel_dilation=d, rngs=rngs)
        self.tanh_filter, self.sigmoid_gate = conv(3, C, d), conv(3, C, d)
        self.residual, self.skip = conv(1, C), conv(1, 12)

    def __call__(self, x):
        y = jnp.tanh(self.tanh_filter(x)) * jax.nn.sigmoid(self.sigmoid_gate(x))
        return x + self.residual(y), self.skip(y)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.input_conv = nnx.Conv(1, C, (1,), rngs=rngs)
        self.blocks = nnx.List([Block(2**i, rngs) for i in range(3)])
        self.out1 = nnx.Conv(12, 12, (1,), rngs=rngs)
        self.out2 = nnx.Conv(12, 5, (1,), rngs=rngs)

    def __call__(self, x):
        x, total = self.input_conv(x), 0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return self.out2(jax.nn.relu(self.out1(jax.nn.relu(total))))


PAIR = Pair(WaveNet, lambda: Net(nnx.Rngs(0)), floats(2, 20, 1))
