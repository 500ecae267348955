"""A radiance field with a skip connection in torch, and a dictionary of weights and biases."""

# mypy: ignore-errors
import jax
import jax.numpy as jnp
import torch

from tests.match.pairs.base import Pair

W = 16


class NeRF(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.pts_linears = torch.nn.ModuleList(
            [
                torch.nn.Linear(9, W),
                torch.nn.Linear(W, W),
                torch.nn.Linear(W + 9, W),
                torch.nn.Linear(W, W),
            ]
        )
        self.feature_linear, self.alpha_linear = torch.nn.Linear(W, W), torch.nn.Linear(W, 1)
        self.views_linear, self.rgb_linear = (
            torch.nn.Linear(W + 4, W // 2),
            torch.nn.Linear(W // 2, 3),
        )

    def forward(self, x, d):
        h = x
        for i, layer in enumerate(self.pts_linears):
            h = torch.relu(layer(torch.cat([x, h], -1) if i == 2 else h))
        alpha = self.alpha_linear(h)
        h = torch.relu(self.views_linear(torch.cat([self.feature_linear(h), d], -1)))
        return torch.cat([self.rgb_linear(h), alpha], -1)


SIZES = {
    "trunk_0": (9, W), "trunk_1": (W, W), "trunk_2": (W + 9, W), "trunk_3": (W, W),
    "bottleneck_feature": (W, W), "sigma": (W, 1), "view_branch": (W + 4, W // 2), "rgb": (W // 2, 3),
}  # fmt: skip


def target():
    return {k: {"kernel": jnp.zeros(s), "bias": jnp.zeros(s[1])} for k, s in SIZES.items()}


def run_target(params, x, d):
    dense = lambda k, x: x @ params[k]["kernel"] + params[k]["bias"]
    h = x
    for i in range(4):
        h = jax.nn.relu(dense(f"trunk_{i}", jnp.concatenate([x, h], -1) if i == 2 else h))
    sigma = dense("sigma", h)
    h = jax.nn.relu(dense("view_branch", jnp.concatenate([dense("bottleneck_feature", h), d], -1)))
    return jnp.concatenate([dense("rgb", h), sigma], -1)


def inputs(rng):
    return rng.normal(size=(6, 9)).astype("float32"), rng.normal(size=(6, 4)).astype("float32")


PAIR = Pair(NeRF, target, inputs, run_target=run_target)
