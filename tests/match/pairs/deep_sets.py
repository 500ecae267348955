"""Deep Sets in torch, and in equinox."""

# mypy: ignore-errors
import equinox as eqx
import jax
import torch

from tests.match.pairs.base import Pair, floats


class DeepSets(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.phi = torch.nn.Sequential(
            torch.nn.Linear(4, 24), torch.nn.ReLU(), torch.nn.Linear(24, 24)
        )
        self.rho = torch.nn.Sequential(
            torch.nn.Linear(24, 24), torch.nn.ReLU(), torch.nn.Linear(24, 2)
        )

    def forward(self, x):
        return self.rho(self.phi(x).sum(1))


class Sets(eqx.Module):
    phi: eqx.nn.MLP
    rho: eqx.nn.MLP

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.phi = eqx.nn.MLP(4, 24, 24, 1, key=a)
        self.rho = eqx.nn.MLP(24, 2, 24, 1, key=b)

    def __call__(self, x):
        return self.rho(jax.vmap(self.phi)(x).sum(0))


PAIR = Pair(
    DeepSets,
    lambda: Sets(jax.random.key(0)),
    floats(3, 6, 4),
    run_target=lambda model, x: jax.vmap(model)(x),
)
