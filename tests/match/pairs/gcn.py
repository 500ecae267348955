"""A graph convolutional network in torch, and plain lists of arrays."""

# mypy: ignore-errors
import itertools

import jax
import jax.numpy as jnp
import torch

from tests.match.pairs.base import Pair


class GraphConv(torch.nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin_self, self.lin_neigh = torch.nn.Linear(i, o), torch.nn.Linear(i, o, bias=False)

    def forward(self, x, adj):
        return self.lin_self(x) + adj @ self.lin_neigh(x)


class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([GraphConv(7, 16), GraphConv(16, 16), GraphConv(16, 3)])

    def forward(self, x, adj):
        for i, conv in enumerate(self.convs):
            x = conv(x, adj)
            x = torch.relu(x) if i < 2 else x
        return x


def target():
    sizes = (7, 16, 16, 3)
    return [
        {"W_self": jnp.zeros((a, b)), "W_neigh": jnp.zeros((a, b)), "b_self": jnp.zeros(b)}
        for a, b in itertools.pairwise(sizes)
    ]


def run_target(params, x, adj):
    for i, p in enumerate(params):
        x = x @ p["W_self"] + p["b_self"] + adj @ (x @ p["W_neigh"])
        x = jax.nn.relu(x) if i < 2 else x
    return x


def inputs(rng):
    return rng.normal(size=(9, 7)).astype("float32"), (rng.random((9, 9)) > 0.6).astype("float32")


PAIR = Pair(GCN, target, inputs, run_target=run_target)
