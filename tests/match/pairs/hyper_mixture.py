"""A mixture density network in torch, and a linen model with automatic names."""

# mypy: ignore-errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import torch

from tests.match.pairs.base import Pair, floats


class MDN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Sequential(
            torch.nn.Linear(3, 20), torch.nn.Tanh(), torch.nn.Linear(20, 20), torch.nn.Tanh()
        )
        self.pi, self.mu, self.sigma = (torch.nn.Linear(20, 5) for _ in range(3))

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([self.pi(h).softmax(-1), self.mu(h), self.sigma(h).exp()], -1)


class Mixture(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.tanh(nn.Dense(20)(x))
        logits = nn.Dense(5, name="mixture_logits")(x)
        means = nn.Dense(5, name="means")(x)
        scales = nn.Dense(5, name="log_scales")(x)
        return jnp.concatenate([nn.softmax(logits), means, jnp.exp(scales)], -1)


def target():
    model = Mixture()
    return model, model.init(jax.random.key(0), jnp.zeros((1, 3)))


PAIR = Pair(MDN, target, floats(4, 3), run_target=lambda m, x: m[0].apply(m[1], x))
