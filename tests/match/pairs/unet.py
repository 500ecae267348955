"""A small U-Net in torch, and in equinox."""

# mypy: ignore-errors
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.functional import interpolate, max_pool2d, relu

from tests.match.pairs.base import Pair, floats


class DoubleConv(torch.nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv1, self.conv2 = (
            torch.nn.Conv2d(i, o, 3, padding=1),
            torch.nn.Conv2d(o, o, 3, padding=1),
        )

    def forward(self, x):
        return relu(self.conv2(relu(self.conv1(x))))


class TorchUNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inc, self.down1, self.down2 = DoubleConv(1, 4), DoubleConv(4, 8), DoubleConv(8, 16)
        self.up1, self.up2 = DoubleConv(24, 8), DoubleConv(12, 4)
        self.outc = torch.nn.Conv2d(4, 2, 1)

    def forward(self, x):
        a = self.inc(x)
        b = self.down1(max_pool2d(a, 2))
        c = self.down2(max_pool2d(b, 2))
        x = self.up1(torch.cat([b, interpolate(c, scale_factor=2)], 1))
        return self.outc(self.up2(torch.cat([a, interpolate(x, scale_factor=2)], 1)))


class Conv2(eqx.Module):
    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d

    def __init__(self, i, o, key):
        a, b = jax.random.split(key)
        self.first = eqx.nn.Conv2d(i, o, 3, padding=1, key=a)
        self.second = eqx.nn.Conv2d(o, o, 3, padding=1, key=b)

    def __call__(self, x):
        return jax.nn.relu(self.second(jax.nn.relu(self.first(x))))


def half(x):
    return x.reshape(x.shape[0], x.shape[1] // 2, 2, -1, 2).max((2, 4))


def double(x):
    return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)


class UNet(eqx.Module):
    contract: list[Conv2]
    expand: list[Conv2]
    readout: eqx.nn.Conv2d

    def __init__(self, key):
        k = jax.random.split(key, 6)
        self.contract = [Conv2(1, 4, k[0]), Conv2(4, 8, k[1]), Conv2(8, 16, k[2])]
        self.expand = [Conv2(24, 8, k[3]), Conv2(12, 4, k[4])]
        self.readout = eqx.nn.Conv2d(4, 2, 1, key=k[5])

    def __call__(self, x):
        a = self.contract[0](x)
        b = self.contract[1](half(a))
        x = self.expand[0](jnp.concatenate([b, double(self.contract[2](half(b)))]))
        return self.readout(self.expand[1](jnp.concatenate([a, double(x)])))


PAIR = Pair(
    TorchUNet,
    lambda: UNet(jax.random.key(0)),
    floats(2, 1, 16, 16),
    run_target=lambda model, x: np.asarray(jax.vmap(model)(x)),
)
