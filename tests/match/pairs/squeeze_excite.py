"""A convolutional classifier with squeeze and excitation in torch, and a functional Keras model."""

# mypy: ignore-errors
import keras
import numpy as np
import torch
from torch.nn.functional import relu

from tests.match.pairs.base import Pair, floats


class SE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.se_reduce, self.se_expand = torch.nn.Linear(8, 4), torch.nn.Linear(4, 8)
        self.body = torch.nn.Conv2d(8, 16, 3, padding=1)
        self.fc = torch.nn.Linear(16, 10)

    def forward(self, x):
        x = relu(self.stem(x.movedim(-1, 1)))
        gate = torch.sigmoid(self.se_expand(relu(self.se_reduce(x.mean((2, 3))))))
        x = relu(self.body(x * gate[:, :, None, None]))
        return self.fc(x.mean((2, 3)))


def target():
    x = image = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(8, 3, padding="same", activation="relu", name="first_conv")(x)
    gate = keras.layers.GlobalAveragePooling2D(keepdims=True)(x)
    gate = keras.layers.Dense(4, "relu", name="squeeze")(gate)
    gate = keras.layers.Dense(8, "sigmoid", name="excite")(gate)
    x = keras.layers.Multiply()([x, gate])
    x = keras.layers.Conv2D(16, 3, padding="same", activation="relu", name="second_conv")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, keras.layers.Dense(10, name="predictions")(x))


PAIR = Pair(SE, target, floats(2, 8, 8, 3), run_target=lambda model, x: np.asarray(model(x)))
