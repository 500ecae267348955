"""Pairs of models that an attacker wrote without having seen the matcher."""

# mypy: ignore-errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch.nn import functional

T = torch.nn
PAIRS = {}


def pair(f):
    PAIRS[f.__name__] = f
    return f


def rt(m, *a):
    with torch.no_grad():
        return m.eval()(*map(torch.as_tensor, a)).numpy()


def fl(*self):
    return lambda r: (r.normal(size=self).astype("f"),)


def tk(n, *self):
    return lambda r: (r.integers(0, n, self),)


@pair
def alexnet_like():
    class S(T.Module):
        def __init__(self):
            super().__init__()
            self.features = T.Sequential(
                T.Conv2d(3, 8, 3, padding=1),
                T.ReLU(),
                T.MaxPool2d(2),
                T.Conv2d(8, 8, 3, padding=1),
                T.ReLU(),
                T.Conv2d(8, 8, 3, padding=1),
                T.ReLU(),
                T.AdaptiveAvgPool2d(1),
            )
            self.classifier = T.Sequential(
                T.Dropout(), T.Linear(8, 8), T.ReLU(), T.Linear(8, 8), T.ReLU(), T.Linear(8, 4)
            )

        def forward(self, x):
            return self.classifier(self.features(x.permute(0, 3, 1, 2)).flatten(1))

    class M(nnx.Module):
        def __init__(self, r):
            self.c1 = nnx.Conv(3, 8, (3, 3), rngs=r)
            self.c2 = nnx.Conv(8, 8, (3, 3), rngs=r)
            self.c3 = nnx.Conv(8, 8, (3, 3), rngs=r)
            self.d1 = nnx.Linear(8, 8, rngs=r)
            self.d2 = nnx.Linear(8, 8, rngs=r)
            self.d3 = nnx.Linear(8, 4, rngs=r)

        def __call__(self, x):
            x = nnx.max_pool(nnx.relu(self.c1(x)), (2, 2), (2, 2))
            x = nnx.relu(self.c3(nnx.relu(self.c2(x)))).mean((1, 2))
            return self.d3(nnx.relu(self.d2(nnx.relu(self.d1(x)))))

    return S(), M(nnx.Rngs(0)), fl(2, 8, 8, 3), lambda m, x: m(x)


@pair
def neox_like():  # parallel attention, separate q k v, rotary by function, untied head
    D, N, V, L = 16, 4, 31, 2

    class A(T.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk, self.wv, self.wo = (T.Linear(D, D, bias=False) for _ in range(4))

        def forward(self, x):
            B, t, _ = x.shape
            q, k, v = (w(x).view(B, t, N, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            return self.wo(
                functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                .transpose(1, 2)
                .reshape(B, t, D)
            )

    class B(T.Module):
        def __init__(self):
            super().__init__()
            self.ln = T.LayerNorm(D)
            self.attn = A()
            self.ff = T.ModuleDict({"in": T.Linear(D, 4 * D), "out": T.Linear(4 * D, D)})

        def forward(self, x):
            h = self.ln(x)
            return x + self.attn(h) + self.ff["out"](functional.gelu(self.ff["in"](h)))

    class S(T.Module):
        def __init__(self):
            super().__init__()
            self.wte = T.Embedding(V, D)
            self.h = T.ModuleList(B() for _ in range(L))
            self.ln_f = T.LayerNorm(D)
            self.unembed = T.Linear(D, V, bias=False)

        def forward(self, i):
            x = self.wte(i)
            for b in self.h:
                x = b(x)
            return self.unembed(self.ln_f(x))

    class Bl(nnx.Module):
        def __init__(self, r):
            self.pre_norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=r)
            self.mha = nnx.MultiHeadAttention(N, D, use_bias=False, decode=False, rngs=r)
            self.expand = nnx.Linear(D, 4 * D, rngs=r)
            self.contract = nnx.Linear(4 * D, D, rngs=r)

        def __call__(self, x):
            h = self.pre_norm(x)
            return (
                x
                + self.mha(h, mask=nnx.make_causal_mask(x[..., 0]))
                + self.contract(jax.nn.gelu(self.expand(h), approximate=False))
            )

    class M(nnx.Module):
        def __init__(self, r):
            self.token_embedding = nnx.Embed(V, D, rngs=r)
            self.layers = nnx.List([Bl(r) for _ in range(L)])
            self.final_layernorm = nnx.LayerNorm(D, epsilon=1e-5, rngs=r)
            self.lm_head = nnx.Linear(D, V, use_bias=False, rngs=r)

        def __call__(self, i):
            x = self.token_embedding(i)
            for b in self.layers:
                x = b(x)
            return self.lm_head(self.final_layernorm(x))

    return S(), M(nnx.Rngs(0)), tk(V, 2, 6), lambda m, x: m(x)


@pair
def siamese_projector():  # two encoders of the same shape named by modality, predictor
    class S(T.Module):
        def __init__(self):
            super().__init__()
            mk = lambda: T.Sequential(T.Linear(6, 8), T.GELU(), T.Linear(8, 8))
            self.image_encoder, self.text_encoder = mk(), mk()
            self.image_projection, self.text_projection = (
                T.Linear(8, 4, bias=False),
                T.Linear(8, 4, bias=False),
            )
            self.logit_scale = T.Parameter(torch.tensor(0.7))

        def forward(self, a, b):
            u = self.image_projection(self.image_encoder(a))
            v = self.text_projection(self.text_encoder(b))
            return self.logit_scale.exp() * u @ v.T

    class E(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="fc2")(nn.gelu(nn.Dense(8, name="fc1")(x), approximate=False))

    class M(nn.Module):
        @nn.compact
        def __call__(self, a, b):
            u = nn.Dense(4, use_bias=False, name="visual_proj")(E(name="visual")(a))
            v = nn.Dense(4, use_bias=False, name="textual_proj")(E(name="textual")(b))
            return jnp.exp(self.param("temperature", nn.initializers.zeros, ())) * u @ v.T

    m = M()
    return (
        S(),
        (m, m.init(jax.random.key(0), jnp.zeros((1, 6)), jnp.zeros((1, 6)))),
        lambda r: (r.normal(size=(3, 6)).astype("f"), r.normal(size=(3, 6)).astype("f")),
        lambda m, a, b: m[0].apply(m[1], a, b),
    )


@pair
def mamba_like():  # parameters of odd shapes
    D, E, K, Sn = 8, 12, 4, 5

    class S(T.Module):
        def __init__(self):
            super().__init__()
            self.in_proj = T.Linear(D, 2 * E, bias=False)
            self.conv1d = T.Conv1d(E, E, K, groups=E, padding=K - 1)
            self.x_proj = T.Linear(E, 3 + 2 * Sn, bias=False)
            self.dt_proj = T.Linear(3, E)
            self.A_log = T.Parameter(torch.randn(E, Sn))
            self.D = T.Parameter(torch.randn(E))
            self.out_proj = T.Linear(E, D, bias=False)

        def forward(self, x):
            u, z = self.in_proj(x).chunk(2, -1)
            L = x.shape[1]
            u = functional.silu(self.conv1d(u.transpose(1, 2))[..., :L].transpose(1, 2))
            p = self.x_proj(u)
            dt = functional.softplus(self.dt_proj(p[..., :3]))
            Bm, C = p[..., 3 : 3 + Sn], p[..., 3 + Sn :]
            A = -self.A_log.exp()
            h = torch.zeros(x.shape[0], E, Sn)
            ys = []
            for t in range(L):
                h = (
                    torch.exp(dt[:, t, :, None] * A) * h
                    + dt[:, t, :, None] * Bm[:, t, None] * u[:, t, :, None]
                )
                ys.append((h * C[:, t, None]).sum(-1))
            y = torch.stack(ys, 1) + u * self.D
            return self.out_proj(y * functional.silu(z))

    class M(nnx.Module):
        def __init__(self, r):
            self.proj_in = nnx.Linear(D, 2 * E, use_bias=False, rngs=r)
            self.conv = nnx.Conv(E, E, (K,), feature_group_count=E, padding=[(K - 1, 0)], rngs=r)
            self.to_params = nnx.Linear(E, 3 + 2 * Sn, use_bias=False, rngs=r)
            self.to_dt = nnx.Linear(3, E, rngs=r)
            self.log_a = nnx.Param(jnp.zeros((E, Sn)))
            self.skip = nnx.Param(jnp.zeros(E))
            self.proj_out = nnx.Linear(E, D, use_bias=False, rngs=r)

        def __call__(self, x):
            u, z = jnp.split(self.proj_in(x), 2, -1)
            u = jax.nn.silu(self.conv(u))
            p = self.to_params(u)
            dt = jax.nn.softplus(self.to_dt(p[..., :3]))
            Bm, C = p[..., 3 : 3 + Sn], p[..., 3 + Sn :]
            A = -jnp.exp(self.log_a[...])
            h = jnp.zeros((x.shape[0], E, Sn))
            ys = []
            for t in range(x.shape[1]):
                h = (
                    jnp.exp(dt[:, t, :, None] * A) * h
                    + dt[:, t, :, None] * Bm[:, t, None] * u[:, t, :, None]
                )
                ys.append((h * C[:, t, None]).sum(-1))
            return self.proj_out((jnp.stack(ys, 1) + u * self.skip[...]) * jax.nn.silu(z))

    return S(), M(nnx.Rngs(0)), fl(2, 5, D), lambda m, x: m(x)


@pair
def lstm_tagger():
    class S(T.Module):
        def __init__(self):
            super().__init__()
            self.emb = T.Embedding(20, 6)
            self.lstm = T.LSTM(6, 7, batch_first=True)
            self.out = T.Linear(7, 3)

        def forward(self, i):
            return self.out(self.lstm(self.emb(i))[0])

    class M(nnx.Module):
        def __init__(self, r):
            self.words = nnx.Embed(20, 6, rngs=r)
            self.cell = nnx.RNN(nnx.OptimizedLSTMCell(6, 7, rngs=r))
            self.tags = nnx.Linear(7, 3, rngs=r)

        def __call__(self, i):
            return self.tags(self.cell(self.words(i)))

    return S(), M(nnx.Rngs(0)), tk(20, 2, 5), lambda m, x: m(x)


@pair
def resnet_bn():
    class Bk(T.Module):
        def __init__(self, i, o, d=None):
            super().__init__()
            self.conv1 = T.Conv2d(i, o, 3, padding=1, bias=False)
            self.bn1 = T.BatchNorm2d(o)
            self.conv2 = T.Conv2d(o, o, 3, padding=1, bias=False)
            self.bn2 = T.BatchNorm2d(o)
            self.shortcut = (
                T.Sequential(T.Conv2d(i, o, 1, bias=False), T.BatchNorm2d(o))
                if i != o
                else T.Identity()
            )

        def forward(self, x):
            return functional.relu(
                self.shortcut(x) + self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
            )

    class S(T.Module):
        def __init__(self):
            super().__init__()
            self.stem = T.Conv2d(3, 8, 3, padding=1, bias=False)
            self.stem_bn = T.BatchNorm2d(8)
            self.stage1 = T.Sequential(Bk(8, 8), Bk(8, 8))
            self.stage2 = T.Sequential(Bk(8, 12), Bk(12, 12))
            self.fc = T.Linear(12, 5)
            for m in self.modules():
                if isinstance(m, T.BatchNorm2d):
                    for p in (m.weight, m.bias, m.running_mean):
                        T.init.normal_(p)
                    T.init.uniform_(m.running_var, 0.5, 2)

        def forward(self, x):
            return self.fc(
                self.stage2(
                    self.stage1(functional.relu(self.stem_bn(self.stem(x.permute(0, 3, 1, 2)))))
                ).mean((2, 3))
            )

    bn = lambda n, r: nnx.BatchNorm(n, use_running_average=True, epsilon=1e-5, rngs=r)

    class B(nnx.Module):
        def __init__(self, i, o, r):
            cv = lambda a, b, k: nnx.Conv(a, b, (k, k), use_bias=False, rngs=r)
            self.c1, self.n1, self.c2, self.n2 = cv(i, o, 3), bn(o, r), cv(o, o, 3), bn(o, r)
            if i != o:
                self.down, self.down_n = cv(i, o, 1), bn(o, r)
            self.p = i != o

        def __call__(self, x):
            y = self.n2(self.c2(nnx.relu(self.n1(self.c1(x)))))
            return nnx.relu(y + (self.down_n(self.down(x)) if self.p else x))

    class M(nnx.Module):
        def __init__(self, r):
            self.conv0 = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=r)
            self.bn0 = bn(8, r)
            self.blocks1 = nnx.List([B(8, 8, r), B(8, 8, r)])
            self.blocks2 = nnx.List([B(8, 12, r), B(12, 12, r)])
            self.logits = nnx.Linear(12, 5, rngs=r)

        def __call__(self, x):
            x = nnx.relu(self.bn0(self.conv0(x)))
            for b in [*self.blocks1, *self.blocks2]:
                x = b(x)
            return self.logits(x.mean((1, 2)))

    return S(), M(nnx.Rngs(0)), fl(2, 6, 6, 3), lambda m, x: m(x)
