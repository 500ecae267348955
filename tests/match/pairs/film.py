"""A network with feature-wise modulation in torch, and in equinox."""

# mypy: ignore-errors
import equinox as eqx
import jax
import torch

from tests.match.pairs.base import Pair

D, C = 14, 5


class FiLMBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(D, D)
        self.film_scale, self.film_shift = torch.nn.Linear(C, D), torch.nn.Linear(C, D)
        self.norm = torch.nn.LayerNorm(D)

    def forward(self, x, c):
        return torch.relu(self.norm(self.linear(x)) * self.film_scale(c) + self.film_shift(c))


class FiLMNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.output = torch.nn.Linear(8, D), torch.nn.Linear(D, 2)
        self.blocks = torch.nn.ModuleList([FiLMBlock() for _ in range(3)])

    def forward(self, x, c):
        x = self.input(x)
        for block in self.blocks:
            x = block(x, c)
        return self.output(x)


class Block(eqx.Module):
    dense: eqx.nn.Linear
    scale_net: eqx.nn.Linear
    shift_net: eqx.nn.Linear
    ln: eqx.nn.LayerNorm

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.dense = eqx.nn.Linear(D, D, key=a)
        self.scale_net, self.shift_net = eqx.nn.Linear(C, D, key=b), eqx.nn.Linear(C, D, key=c)
        self.ln = eqx.nn.LayerNorm(D)

    def __call__(self, x, c):
        return jax.nn.relu(self.ln(self.dense(x)) * self.scale_net(c) + self.shift_net(c))


class Net(eqx.Module):
    stem: eqx.nn.Linear
    layers: list[Block]
    readout: eqx.nn.Linear

    def __init__(self, key):
        a, b, *keys = jax.random.split(key, 5)
        self.stem, self.readout = eqx.nn.Linear(8, D, key=a), eqx.nn.Linear(D, 2, key=b)
        self.layers = [Block(k) for k in keys]

    def __call__(self, x, c):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, c)
        return self.readout(x)


def inputs(rng):
    return rng.normal(size=(4, 8)).astype("float32"), rng.normal(size=(4, C)).astype("float32")


PAIR = Pair(
    FiLMNet, lambda: Net(jax.random.key(0)), inputs, run_target=lambda m, x, c: jax.vmap(m)(x, c)
)
