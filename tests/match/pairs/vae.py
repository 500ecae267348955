"""A variational autoencoder's deterministic part in torch, and in equinox."""

# mypy: ignore-errors
import equinox as eqx
import jax
import jax.numpy as jnp
import torch

from tests.match.pairs.base import Pair, floats


class TorchVAE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Linear(18, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU()
        )
        self.fc_mu, self.fc_logvar = torch.nn.Linear(32, 6), torch.nn.Linear(32, 6)
        self.decoder = torch.nn.Sequential(
            torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 18)
        )

    def forward(self, x):
        h = self.encoder(x)
        z = self.fc_mu(h) + torch.exp(0.5 * self.fc_logvar(h))
        return self.decoder(z)


class VAE(eqx.Module):
    enc1: eqx.nn.Linear
    enc2: eqx.nn.Linear
    mu: eqx.nn.Linear
    logvar: eqx.nn.Linear
    dec1: eqx.nn.Linear
    dec2: eqx.nn.Linear

    def __init__(self, key):
        keys = iter(jax.random.split(key, 6))
        self.enc1 = eqx.nn.Linear(18, 32, key=next(keys))
        self.enc2 = eqx.nn.Linear(32, 32, key=next(keys))
        self.mu = eqx.nn.Linear(32, 6, key=next(keys))
        self.logvar = eqx.nn.Linear(32, 6, key=next(keys))
        self.dec1 = eqx.nn.Linear(6, 32, key=next(keys))
        self.dec2 = eqx.nn.Linear(32, 18, key=next(keys))

    def __call__(self, x):
        h = jax.nn.relu(self.enc2(jax.nn.relu(self.enc1(x))))
        z = self.mu(h) + jnp.exp(0.5 * self.logvar(h))
        return self.dec2(jax.nn.relu(self.dec1(z)))


PAIR = Pair(
    TorchVAE,
    lambda: eqx.filter_eval_shape(VAE, jax.random.key(0)),
    floats(4, 18),
    run_target=lambda model, x: jax.jit(lambda x: jax.vmap(model)(x))(x),
)
