"""A small ResNet with batch norms in torch, and in linen."""

# mypy: ignore-errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import torch
from torch.nn.functional import relu

from tests.match.pairs.base import Pair, floats


class BasicBlock(torch.nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(o)
        self.conv2 = torch.nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(o)
        self.downsample = None
        if stride > 1:
            self.downsample = torch.nn.Sequential(
                torch.nn.Conv2d(i, o, 1, stride, bias=False), torch.nn.BatchNorm2d(o)
            )

    def forward(self, x):
        y = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(y + (x if self.downsample is None else self.downsample(x)))


class TorchResNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(8)
        self.layer1 = torch.nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = torch.nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.fc = torch.nn.Linear(16, 5)

    def forward(self, x):
        x = relu(self.bn1(self.conv1(x.movedim(-1, 1))))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class ResNetBlock(nn.Module):
    features: int
    stride: int

    @nn.compact
    def __call__(self, x):
        norm = lambda name: nn.BatchNorm(True, epsilon=1e-5, name=name)
        pad = ((1, 1), (1, 1))
        y = nn.Conv(self.features, (3, 3), self.stride, pad, use_bias=False, name="conv_1")(x)
        y = nn.relu(norm("norm_1")(y))
        y = norm("norm_2")(nn.Conv(self.features, (3, 3), 1, pad, use_bias=False, name="conv_2")(y))
        if self.stride > 1:
            x = nn.Conv(
                self.features, (1, 1), self.stride, "VALID", use_bias=False, name="conv_proj"
            )(x)
            x = norm("norm_proj")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), 1, ((1, 1), (1, 1)), use_bias=False, name="stem")(x)
        x = nn.relu(nn.BatchNorm(True, epsilon=1e-5, name="stem_norm")(x))
        for i, features in enumerate((8, 16)):
            for j in range(2):
                x = ResNetBlock(features, 2 if i and not j else 1, name=f"stage{i}_block{j}")(x)
        return nn.Dense(5, name="logits")(x.mean((1, 2)))


def source():
    model = TorchResNet()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor in (
                module.running_mean,
                module.running_var,
                module.weight.data,
                module.bias.data,
            ):
                tensor.uniform_(0.5, 1.5)
    return model


def target():
    model = ResNet()
    return model, model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))


PAIR = Pair(source, target, floats(2, 8, 8, 3), run_target=lambda m, x: m[0].apply(m[1], x))
