"""An actor-critic network in torch, and haiku-like nested dictionaries."""

# mypy: ignore-errors
import itertools

import jax.numpy as jnp
import torch

from tests.match.pairs.base import Pair, floats


class ActorCritic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = torch.nn.Sequential(
            torch.nn.Linear(11, 16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 3),
        )
        self.critic = torch.nn.Sequential(
            torch.nn.Linear(11, 16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 1),
        )

    def forward(self, x):
        return torch.cat([self.actor(x), self.critic(x)], -1)


def target():
    sizes = {"actor_net": (11, 16, 16, 3), "critic_net": (11, 16, 16, 1)}
    return {
        f"{net}/~/linear_{i}": {"w": jnp.zeros((a, b)), "b": jnp.zeros(b)}
        for net, s in sizes.items()
        for i, (a, b) in enumerate(itertools.pairwise(s))
    }


def run_target(params, x):
    def net(name):
        y = x
        for i in range(3):
            layer = params[f"{name}/~/linear_{i}"]
            y = y @ layer["w"] + layer["b"]
            y = jnp.tanh(y) if i < 2 else y
        return y

    return jnp.concatenate([net("actor_net"), net("critic_net")], -1)


PAIR = Pair(ActorCritic, target, floats(5, 11), run_target=run_target)
