"""PointNet with batch norms in torch, and in nnx."""

# mypy: ignore-errors
import itertools

import jax
import torch
from flax import nnx

from tests.match.pairs.base import Pair, floats


class PointNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (3, 8, 16, 32)
        self.convs = torch.nn.ModuleList(
            [torch.nn.Conv1d(a, b, 1) for a, b in itertools.pairwise(sizes)]
        )
        self.bns = torch.nn.ModuleList([torch.nn.BatchNorm1d(b) for b in sizes[1:]])
        self.fc1, self.fc2 = torch.nn.Linear(32, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        x = x.transpose(1, 2)
        for conv, bn in zip(self.convs, self.bns, strict=True):
            x = torch.relu(bn(conv(x)))
        return self.fc2(torch.relu(self.fc1(x.amax(-1))))


class Net(nnx.Module):
    def __init__(self, rngs):
        sizes = (3, 8, 16, 32)
        pairs = list(itertools.pairwise(sizes))
        self.shared = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairs])
        self.norms = nnx.List(
            [nnx.BatchNorm(b, use_running_average=True, epsilon=1e-5, rngs=rngs) for _, b in pairs]
        )
        self.hidden, self.out = nnx.Linear(32, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for layer, norm in zip(self.shared, self.norms, strict=True):
            x = jax.nn.relu(norm(layer(x)))
        return self.out(jax.nn.relu(self.hidden(x.max(1))))


def source():
    model = PointNet()
    for bn in model.bns:
        for tensor in (bn.running_mean, bn.running_var, bn.weight.data, bn.bias.data):
            tensor.uniform_(0.5, 1.5)
    return model


PAIR = Pair(source, lambda: Net(nnx.Rngs(0)), floats(2, 12, 3))
