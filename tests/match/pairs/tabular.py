"""A transformer over tabular features in torch, and a functional Keras model."""

# mypy: ignore-errors
import keras
import numpy as np
import torch

from tests.match.pairs.base import Pair, tokens

D, T = 12, 5


class TabTransformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cat_embed = torch.nn.Embedding(40, D)
        self.transformer = torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(D, 3, 20, batch_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(D * T, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
        )

    def forward(self, ids):
        return self.mlp(self.transformer(self.cat_embed(ids)).flatten(1))


def target():
    ids = keras.Input((T,), dtype="int32")
    x = keras.layers.Embedding(40, D, name="category_embedding")(ids)
    for i in range(2):
        y = keras.layers.MultiHeadAttention(3, D // 3, name=f"block{i}_attention")(x, x)
        x = keras.layers.LayerNormalization(epsilon=1e-5, name=f"block{i}_ln_attention")(x + y)
        y = keras.layers.Dense(20, "relu", name=f"block{i}_ff_in")(x)
        y = keras.layers.Dense(D, name=f"block{i}_ff_out")(y)
        x = keras.layers.LayerNormalization(epsilon=1e-5, name=f"block{i}_ln_ff")(x + y)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(16, "relu", name="hidden")(x)
    return keras.Model(ids, keras.layers.Dense(3, name="logits")(x))


PAIR = Pair(TabTransformer, target, tokens(40, 2, T), run_target=lambda m, x: np.asarray(m(x)))
