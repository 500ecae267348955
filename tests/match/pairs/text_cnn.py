"""A convolutional text classifier in torch, and a Keras model with layers as attributes."""

# mypy: ignore-errors
import keras
import numpy as np
import torch

from tests.match.pairs.base import Pair, tokens


class TextCNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(60, 10)
        self.convs = torch.nn.ModuleList([torch.nn.Conv1d(10, 7, k) for k in (3, 4, 5)])
        self.classifier = torch.nn.Linear(21, 2)

    def forward(self, ids):
        x = self.embedding(ids).transpose(1, 2)
        return self.classifier(torch.cat([torch.relu(c(x)).amax(-1) for c in self.convs], 1))


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed = keras.layers.Embedding(60, 10)
        self.tri, self.quad, self.penta = (
            keras.layers.Conv1D(7, k, activation="relu") for k in (3, 4, 5)
        )
        self.pool = keras.layers.GlobalMaxPooling1D()
        self.out = keras.layers.Dense(2)

    def call(self, ids):
        x = self.embed(ids)
        return self.out(
            keras.ops.concatenate([self.pool(c(x)) for c in (self.tri, self.quad, self.penta)], -1)
        )


def target():
    model = Net()
    model(np.zeros((1, 12), "int32"))
    return model


PAIR = Pair(TextCNN, target, tokens(60, 2, 12), run_target=lambda m, x: np.asarray(m(x)))
