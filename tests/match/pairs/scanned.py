"""A nanoGPT-like decoder in torch, and a linen decoder scanned over layers."""

# mypy: ignore-errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import torch

from tests.match.pairs.base import Pair, tokens

D, N, L, V, T = 16, 2, 3, 41, 10


class CausalSelfAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = torch.nn.Linear(D, 3 * D), torch.nn.Linear(D, D)

    def forward(self, x):
        q, k, v = (
            z.reshape(len(x), -1, N, D // N).transpose(1, 2) for z in self.c_attn(x).split(D, 2)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class TorchBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(D), torch.nn.LayerNorm(D)
        self.attn = CausalSelfAttention()
        self.mlp = torch.nn.ModuleDict(
            {"c_fc": torch.nn.Linear(D, 4 * D), "c_proj": torch.nn.Linear(4 * D, D)}
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](torch.nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(V, D), torch.nn.Embedding(T, D)
        self.h = torch.nn.ModuleList([TorchBlock() for _ in range(L)])
        self.ln_f, self.lm_head = torch.nn.LayerNorm(D), torch.nn.Linear(D, V, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm(1e-5, name="norm_attn")(x)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(N, name="attention")(y, y, mask=mask)
        y = nn.Dense(4 * D, name="up")(nn.LayerNorm(1e-5, name="norm_mlp")(x))
        return x + nn.Dense(D, name="down")(nn.gelu(y, approximate=False)), None


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(V, D, name="token_embed")(ids)
        x = x + self.param("pos_embed", nn.initializers.zeros, (T, D))
        stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=L)
        x, _ = stack(name="layers")(x, None)
        return nn.Dense(V, use_bias=False, name="logits")(nn.LayerNorm(1e-5, name="norm_out")(x))


def target():
    model = Decoder()
    return model, jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, T), int))


def run_target(model, ids):
    return jax.jit(model[0].apply)(model[1], ids)


PAIR = Pair(NanoGPT, target, tokens(V, 2, T), run_target=run_target)
