"""More pairs of models that an attacker wrote without having seen the matcher."""

# mypy: ignore-errors
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import torch
from flax import nnx
from keras import layers as kl
from torch.nn import functional

from tests.match.strangers import T, fl, pair, tk


@pair
def hyperbottleneck_equinox():
    class S(T.Module):
        def __init__(self):
            super().__init__()
            self.enc = T.ModuleList([T.Linear(10, 8), T.Linear(8, 6), T.Linear(6, 4)])
            self.dec = T.ModuleList([T.Linear(4, 6), T.Linear(6, 8), T.Linear(8, 10)])

        def forward(self, x):
            for l in [*self.enc, *self.dec]:
                x = torch.tanh(l(x))
            return x

    class M(eqx.Module):
        down: list
        up: list

        def __init__(self, k):
            ks = jax.random.split(k, 6)
            self.down = [
                eqx.nn.Linear(a, b, key=q)
                for a, b, q in zip((10, 8, 6), (8, 6, 4), ks[:3], strict=False)
            ]
            self.up = [
                eqx.nn.Linear(a, b, key=q)
                for a, b, q in zip((4, 6, 8), (6, 8, 10), ks[3:], strict=False)
            ]

        def __call__(self, x):
            for l in [*self.down, *self.up]:
                x = jnp.tanh(l(x))
            return x

    return S(), M(jax.random.key(0)), fl(3, 10), lambda m, x: jax.vmap(m)(x)


@pair
def cross_decoder_keras():
    D, N = 12, 3

    class S(T.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = T.MultiheadAttention(D, N, batch_first=True)
            self.multihead_attn = T.MultiheadAttention(D, N, batch_first=True)
            self.norm1, self.norm2, self.norm3 = (T.LayerNorm(D) for _ in range(3))
            self.linear1, self.linear2 = T.Linear(D, 20), T.Linear(20, D)
            for n in (self.norm1, self.norm2, self.norm3):
                T.init.normal_(n.weight)
            for a in (self.self_attn, self.multihead_attn):
                T.init.normal_(a.in_proj_bias)
                T.init.normal_(a.out_proj.bias)

        def forward(self, x, m):
            x = self.norm1(x + self.self_attn(x, x, x, need_weights=False)[0])
            x = self.norm2(x + self.multihead_attn(x, m, m, need_weights=False)[0])
            return self.norm3(x + self.linear2(functional.relu(self.linear1(x))))

    x, m = keras.Input((5, D)), keras.Input((7, D))
    h = kl.LayerNormalization(epsilon=1e-5, name="after_self")(
        x + kl.MultiHeadAttention(N, D // N, name="self_attention")(x, x)
    )
    h = kl.LayerNormalization(epsilon=1e-5, name="after_cross")(
        h + kl.MultiHeadAttention(N, D // N, name="cross_attention")(h, m)
    )
    h = kl.LayerNormalization(epsilon=1e-5, name="after_mlp")(
        h + kl.Dense(D, name="mlp_down")(kl.Dense(20, activation="relu", name="mlp_up")(h))
    )
    return (
        S(),
        keras.Model([x, m], h),
        lambda r: (r.normal(size=(2, 5, D)).astype("f"), r.normal(size=(2, 7, D)).astype("f")),
        lambda k, a, b: np.asarray(k([a, b])),
    )


@pair
def swiglu_gqa_scan():  # linen nn.scan with the stack on axis 0
    D, N, K, H, V, L = 16, 4, 2, 4, 29, 3

    class At(T.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = T.Linear(D, N * H, bias=False)
            self.k_proj = T.Linear(D, K * H, bias=False)
            self.v_proj = T.Linear(D, K * H, bias=False)
            self.o_proj = T.Linear(N * H, D, bias=False)

        def forward(self, x):
            B, t, _ = x.shape
            q = self.q_proj(x).view(B, t, N, H).transpose(1, 2)
            k, v = (
                w(x).view(B, t, K, H).transpose(1, 2).repeat_interleave(N // K, 1)
                for w in (self.k_proj, self.v_proj)
            )
            return self.o_proj(
                functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                .transpose(1, 2)
                .reshape(B, t, -1)
            )

    class Ml(T.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (
                T.Linear(D, 24, bias=False),
                T.Linear(D, 24, bias=False),
                T.Linear(24, D, bias=False),
            )

        def forward(self, x):
            return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class B(T.Module):
        def __init__(self):
            super().__init__()
            self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm = (
                At(),
                Ml(),
                T.RMSNorm(D, eps=1e-6),
                T.RMSNorm(D, eps=1e-6),
            )
            T.init.normal_(self.input_layernorm.weight)
            T.init.normal_(self.post_attention_layernorm.weight)

        def forward(self, x):
            x = x + self.self_attn(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))

    class S(T.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = T.Embedding(V, D)
            self.layers = T.ModuleList(B() for _ in range(L))
            self.norm = T.RMSNorm(D, eps=1e-6)
            self.lm_head = T.Linear(D, V, bias=False)

        def forward(self, i):
            x = self.embed_tokens(i)
            for b in self.layers:
                x = b(x)
            return self.lm_head(self.norm(x))

    class Blk(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            g = lambda f, n, ax=-1: nn.DenseGeneral(f, axis=ax, use_bias=False, name=n)
            h = nn.RMSNorm(name="attn_norm")(x)
            q, k, v = g((N, H), "wq")(h), g((K, H), "wk")(h), g((K, H), "wv")(h)
            x = x + g(D, "wo", (-2, -1))(jax.nn.dot_product_attention(q, k, v, is_causal=True))
            h = nn.RMSNorm(name="ffn_norm")(x)
            return x + g(D, "w_down")(nn.silu(g(24, "w_gate")(h)) * g(24, "w_up")(h)), None

    class M(nn.Module):
        @nn.compact
        def __call__(self, i):
            x = nn.Embed(V, D, name="tok_embeddings")(i)
            x, _ = nn.scan(Blk, variable_axes={"params": 0}, split_rngs={"params": True}, length=L)(
                name="blocks"
            )(x, None)
            return nn.Dense(V, use_bias=False, name="output")(nn.RMSNorm(name="out_norm")(x))

    m = M()
    return (
        S(),
        (m, m.init(jax.random.key(0), jnp.zeros((1, 3), int))),
        tk(V, 2, 6),
        lambda m, x: m[0].apply(m[1], x),
    )


@pair
def scan_axis_one():  # linen nn.scan whose stack is axis 1
    D, L = 10, 3

    class S(T.Module):
        def __init__(self):
            super().__init__()
            self.blocks = T.ModuleList(
                T.ModuleDict(
                    {"norm": T.LayerNorm(D), "fc1": T.Linear(D, 14), "fc2": T.Linear(14, D)}
                )
                for _ in range(L)
            )

        def forward(self, x):
            for b in self.blocks:
                x = x + b["fc2"](torch.relu(b["fc1"](b["norm"](x))))
            return x

    class Blk(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(D, name="down")(
                nn.relu(nn.Dense(14, name="up")(nn.LayerNorm(epsilon=1e-5, name="ln")(x)))
            ), None

    class M(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(Blk, variable_axes={"params": 1}, split_rngs={"params": True}, length=L)(
                name="stack"
            )(x, None)[0]

    m = M()
    return (
        S(),
        (m, m.init(jax.random.key(0), jnp.zeros((1, D)))),
        fl(4, D),
        lambda m, x: m[0].apply(m[1], x),
    )


@pair
def moe_stacked():  # experts apart in torch, stacked in nnx
    D, E, Fh = 8, 4, 11

    class S(T.Module):
        def __init__(self):
            super().__init__()
            self.gate = T.Linear(D, E, bias=False)
            self.experts = T.ModuleList(
                T.ModuleDict(
                    {
                        "w1": T.Linear(D, Fh, bias=False),
                        "w3": T.Linear(D, Fh, bias=False),
                        "w2": T.Linear(Fh, D, bias=False),
                    }
                )
                for _ in range(E)
            )

        def forward(self, x):
            p = self.gate(x).softmax(-1)
            y = torch.stack(
                [e["w2"](functional.silu(e["w1"](x)) * e["w3"](x)) for e in self.experts], -2
            )
            return (p[..., None] * y).sum(-2)

    class M(nnx.Module):
        def __init__(self, r):
            self.router = nnx.Linear(D, E, use_bias=False, rngs=r)
            self.w1 = nnx.Param(jnp.zeros((E, D, Fh)))
            self.w3 = nnx.Param(jnp.zeros((E, D, Fh)))
            self.w2 = nnx.Param(jnp.zeros((E, Fh, D)))

        def __call__(self, x):
            p = jax.nn.softmax(self.router(x))
            h = jax.nn.silu(jnp.einsum("bd,edf->bef", x, self.w1[...])) * jnp.einsum(
                "bd,edf->bef", x, self.w3[...]
            )
            return (p[..., None] * jnp.einsum("bef,efd->bed", h, self.w2[...])).sum(-2)

    return S(), M(nnx.Rngs(0)), fl(5, D), lambda m, x: m(x)
