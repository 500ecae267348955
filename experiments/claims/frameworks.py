"""Checks of the first document: why two frameworks give different results."""

import os
import subprocess
import sys

import numpy as np
import torch

from experiments.claims.claims import SAME, Found, found
from experiments.claims.printed import (
    B,
    D,
    N,
    T,
    Weights,
    apart,
    features,
    tensorflow_layer,
    tensorflow_weights,
    torch_layer,
    torch_weights,
)
from jaxmha import Semantics
from jaxmha.converters import keras as keras_converter
from jaxmha.converters import linear
from jaxmha.converters import torch as torch_converter
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import oracle

VALID = 6  # of T keys, where a mask is given
DEEP, LAYERS = 12, (tensorflow_layer, torch_layer)


def _keep(*shape: int) -> NDArray:
    return np.broadcast_to(np.arange(T) < VALID, (*shape, T)).copy()


def same_principle() -> Found:
    """One set of weights in both libraries' layers."""
    ours, theirs, _ = _libraries()
    return found({"weights converted": apart(ours, theirs) < SAME}, apart=apart(ours, theirs))


def _libraries(kept: bool | None = None) -> tuple[NDArray, NDArray, float]:
    """Both layers, without or with a padding mask, which Keras is given as torch is or converted."""
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(D, N, batch_first=True).eval()
    layer = keras_converter.to_module(*torch_converter.from_module(module))
    x, blocked = features(), ~_keep(B)
    masks: dict[str, torch.Tensor] = {}
    keras_mask = None
    if kept is not None:
        masks["key_padding_mask"] = torch.tensor(blocked)
        keras_mask = (~blocked if kept else blocked)[:, None]
    with torch.no_grad():
        out = module(*[torch.tensor(x)] * 3, need_weights=False, **masks)[0].numpy()
    other = np.asarray(layer(x, x, attention_mask=keras_mask))
    import keras

    fresh = keras.layers.MultiHeadAttention(N, D // N)
    return other, out, apart(np.asarray(fresh(x, x)), out)


def different_results() -> Found:
    """As they come, and converted."""
    _, _, unrelated = _libraries()
    inverted = apart(*_libraries(kept=False)[:2])
    converted = apart(*_libraries(kept=True)[:2])
    holds = {
        "weights as drawn": unrelated > SAME,
        "weights converted, mask not": inverted > SAME,
        "weights and mask converted": converted > SAME,
    }
    return found(holds, unrelated=unrelated, inverted=inverted, converted=converted)


def xavier() -> Found:
    """Bounds of what is drawn, and Glorot's."""
    import keras

    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(D, N)
    layer = keras.layers.MultiHeadAttention(N, D // N)
    layer.build((None, None, D), (None, None, D))
    drawn = {
        "q, k, v of nn.MultiheadAttention": (module.in_proj_weight, D, 3 * D),
        "output layer of nn.MultiheadAttention": (module.out_proj.weight, D, D),
        "nn.Linear in example 1": (torch_weights()["q_proj"][0], D, D),
        "Keras MultiHeadAttention": (layer.get_weights()[0], D, D),
        "Dense in example 2": (tensorflow_weights()["q_proj"][0], D, D),
    }
    holds = {}
    for name, (kernel, ins, outs) in drawn.items():
        largest = float(np.abs(np.asarray(torch.as_tensor(kernel).detach())).max())
        holds[name] = abs(largest / (6 / (ins + outs)) ** 0.5 - 1) < 0.02
    return found(holds, bound=D**-0.5, glorot=(6 / (2 * D)) ** 0.5)


def slight_deviations() -> Found:
    """Weights of one formula and two seeds, and the spread of weights of the two examples."""
    a, b, x = torch_weights(), tensorflow_weights(), features()
    other = torch_weights(1)["q_proj"][0]
    spreads = [float(w["q_proj"][0].std()) for w in (a, b)]
    outputs = [float(torch_layer(a, x).std()), float(tensorflow_layer(b, x).std())]
    seeds = apart(other, a["q_proj"][0])
    holds = {
        "spread, two seeds of one formula": abs(other.std() / spreads[0] - 1) < 0.1,
        "weights, two seeds of one formula": seeds < 0.1,
        "spread, two formulas": spreads[1] / spreads[0] < 1.1,
        "outputs, two formulas": outputs[1] / outputs[0] < 1.1,
    }
    return found(
        holds,
        seeds=seeds,
        torch=spreads[0],
        keras=spreads[1],
        torch_out=outputs[0],
        keras_out=outputs[1],
        bias=a["q_proj"][1].std(),
        keras_bias=b["q_proj"][1].std(),
    )


def compounding() -> Found:
    """One part in a million of the weights, through one layer and through six."""
    weights = tensorflow_weights()
    rng = np.random.default_rng(0)
    moved = {n: (k * (1 + 1e-6 * rng.standard_normal(k.shape)), b) for n, (k, b) in weights.items()}
    x = [features()] * 2
    grown = []
    for _ in range(6):
        x = [_exact(w, rows) for w, rows in zip((weights, moved), x, strict=True)]
        grown.append(apart(*x))
    return found(
        {
            "each layer adds to them": grown[-1] > 1.5 * grown[0],
            "layers multiply them": grown[-1] > 6 * grown[0],
        },
        one=grown[0],
        six=grown[-1],
        times=grown[-1] / grown[0],
    )


def _exact(weights: Weights, x: NDArray) -> NDArray:
    pairs = {f"{name}/{part}": x for name, both in weights.items()
             for part, x in zip(("kernel", "bias"), both, strict=True)}  # fmt: skip
    params = linear.import_params(pairs, layout="dense", num_heads=N)[0]
    return oracle.run(params, Semantics(), x, x, x).output


def seeds() -> Found:
    """The same seed in both, and different ones; and one seed twice in each."""
    import tensorflow as tf

    x = features()

    def outputs(a: int, b: int) -> list[NDArray]:
        return [torch_layer(torch_weights(a), x), tensorflow_layer(tensorflow_weights(b), x)]

    def difference(a: int, b: int) -> float:
        first, second = outputs(a, b)
        return float(np.abs(first - second).sum())

    first, again = outputs(42, 42), outputs(42, 42)
    same, other = np.abs(first[0] - first[1]).sum(), [difference(42, seed) for seed in (1, 2, 3)]
    torch.manual_seed(42)
    tf.random.set_seed(42)
    drawn = torch.randn(100_000).numpy(), tf.random.normal([100_000]).numpy()
    return found(
        {
            "between the frameworks": same < 0.9 * min(other),
            "from run to run of torch": np.array_equal(first[0], again[0]),
            "from run to run of TensorFlow": np.array_equal(first[1], again[1]),
        },
        same=same,
        least=min(other),
        most=max(other),
        again=apart(again[1], first[1]),
        correlation=np.corrcoef(*drawn)[0, 1],
    )


def seeds_leave_a_difference() -> Found:
    """The observation of example 3, without the mask that stops it."""
    x = features()
    out = [torch_layer(torch_weights(), x), tensorflow_layer(tensorflow_weights(), x)]
    return found({"seed 42 in both": apart(*out) > SAME}, apart=apart(*out))


def intrinsic() -> Found:
    """Both examples with the weights of one, without a mask and with the ones of example 3, which
    get the axis that they lack."""
    x, weights, ones = features(), torch_weights(), np.ones((B, 1, T), bool)
    a, b = torch_layer(weights, x), tensorflow_layer(weights, x)
    masked = apart(tensorflow_layer(weights, x, ones), torch_layer(weights, x, ones))
    own = tensorflow_layer(tensorflow_weights(), x)
    return found(
        {
            "weights copied, the mask of example 3": masked > SAME,
            "weights copied, no mask": apart(b, a) > SAME,
        },
        own=np.abs(own - a).sum(),
        copied=np.abs(b - a).sum(),
        largest=np.abs(b - a).max(),
        masked=masked,
    )


def inserted_axis() -> Found:
    """Does the mask of one batch row reach others? A batch of one row has none."""
    weights, keep = torch_weights(), np.ones((N, T), bool)
    x = features(batch=N)
    before = torch_layer(weights, x, keep)
    keep[1, VALID:] = False
    after = torch_layer(weights, x, keep)
    right = torch_layer(weights, x, keep[:, None])
    other = apart(after[0], before[0])
    alone = torch_layer(weights, x[1:2], keep[1:2])
    holds = {"B = 1": apart(alone, right[1:2]) < SAME, "B = N": other == 0}
    return found(holds, other=other, right=float(np.abs(right[0] - before[0]).max()))


def true_attends() -> Found:
    """Tests for which functions of torch True in a mask means that the key is attended."""
    x, weights, keep = features(), torch_weights(), _keep(B)
    exact = torch_layer(weights, x, keep[:, None])
    heads = torch.randn(B, N, T, 4)
    full = torch.tensor(keep[:, None, None])
    sdpa = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=full)
    some = torch.nn.functional.scaled_dot_product_attention(
        heads, heads[:, :, :VALID], heads[:, :, :VALID]
    )
    only = torch_layer(weights, x[:, :VALID])
    module = torch.nn.MultiheadAttention(D, N, batch_first=True)
    rows = torch.tensor(x)
    with torch.no_grad():
        out = module(rows, rows, rows, key_padding_mask=torch.tensor(keep), need_weights=False)[0]
        right = module(rows, rows[:, :VALID], rows[:, :VALID], need_weights=False)[0]
    wrong = apart(out.numpy(), right.numpy())
    holds = {
        "example 1": apart(exact[:, :VALID], only) < SAME,
        "scaled_dot_product_attention": apart(sdpa.numpy(), some.numpy()) < SAME,
        "nn.MultiheadAttention": wrong < SAME,
    }
    return found(holds, wrong=wrong)


def large_negative() -> Found:
    """A finite constant leaves the mean of the values in a row without keys; -inf does not."""
    x, weights = features(), torch_weights()
    nothing = np.zeros((B, 1, T), bool)
    means = np.abs(np.diff(torch_layer(weights, x, nothing), axis=1)).max()
    module = torch.nn.MultiheadAttention(D, N, batch_first=True)
    rows, blocked = torch.tensor(x), torch.ones(B, T, dtype=torch.bool)
    with torch.no_grad():
        out = [
            module(rows, rows, rows, key_padding_mask=blocked, need_weights=asked)[0]
            for asked in (True, False)
        ]
        zero = bool((out[1] == module.out_proj.bias).all())
    holds: dict[str, bool] = {
        "example 1": bool(means < 1e-6),
        "nn.MultiheadAttention": not (bool(out[0].isnan().all()) and zero),
    }
    return found(holds, rows=means)


def negligible() -> Found:
    """Other features at masked keys: what reaches the rows of the others."""
    weights, x = torch_weights(), features()
    moved = x.copy()
    moved[:, VALID:] *= -3
    changes = []
    for keep in (_keep(B, 1), np.zeros((B, 1, T), bool)):
        out = [torch_layer(weights, rows, keep)[:, :VALID] for rows in (x, moved)]
        changes.append(apart(out[1], out[0]))
    return found(
        {"rows with a key": changes[0] < SAME, "rows without": changes[1] < SAME},
        some=changes[0],
        nothing=changes[1],
    )


def _keras_masked(mask: NDArray | None) -> NDArray:
    import keras

    keras.utils.set_random_seed(0)
    x = features()
    return np.asarray(keras.layers.MultiHeadAttention(N, D // N)(x, x, attention_mask=mask))


def float_mask() -> Found:
    """Keras with one mask in several dtypes, and with other numbers in it."""
    keep = _keep(B, 1)
    exact = _keras_masked(keep)
    holds = {
        "0 and 1 in float32": apart(_keras_masked(keep.astype("f")), exact) == 0,
        "other numbers": apart(_keras_masked(0.3 * keep.astype("f")), exact) > 0,
    }
    added = _keras_masked(np.where(keep, 0.0, -1e9).astype("f"))
    return found(holds, added=apart(added, exact))


def zero_masks() -> Found:
    """Keras, and the example, with the same padding mask."""
    keep, x, weights = _keep(B, 1), features(), torch_weights()
    exact = torch_layer(weights, x, keep)
    printed = tensorflow_layer(weights, x, keep)
    inverted = tensorflow_layer(weights, x, ~keep)
    poisoned = _keras_masked(keep.astype("f")), _keras_masked(keep)
    holds = {
        "Keras MultiHeadAttention": apart(*poisoned) == 0
        and apart(_keras_masked((~keep).astype("f")), poisoned[0]) > SAME,
        "example 2": apart(printed, exact) < SAME,
    }
    return found(holds, printed=apart(printed, exact), inverted=apart(inverted, exact))


def no_mask_is_ones() -> Found:
    """All ones, broadcast as the examples would have it."""
    x, weights, ones = features(), torch_weights(), np.ones((B, 1, T), bool)
    plain = torch_layer(weights, x)
    first, second = torch_layer(weights, x, ones), tensorflow_layer(weights, x, ones)
    rows = np.abs(np.diff(second, axis=1)).max()
    holds = {"example 1": apart(first, plain) < SAME, "example 2": apart(second, plain) < SAME}
    return found(holds, second=apart(second, plain), rows=rows)


def equivalent_masks() -> Found:
    """-1e9 and -inf in float32; what fits into float16 next to logits of its size."""
    x, weights, keep = features(), torch_weights(), _keep(B, 1)
    finite = torch_layer(weights, x, keep)
    infinite = torch_layer(weights, x, keep, fill=-np.inf)
    logits = torch.tensor([-6000.0, 6000.0], dtype=torch.float16)
    hidden = torch.tensor([False, True])
    leak = torch.softmax(logits + torch.where(hidden, -1e4, 0.0).half(), -1)[1]
    holds = {
        "float32, -1e9 and -inf": apart(finite, infinite) > 0,
        "float16, -1e4 and logits of 6000": leak > 0,
    }
    return found(holds, leak=leak)  # type: ignore[arg-type]  # tensors; found() makes them bool


def order_of_sums() -> Found:
    """The same numbers, summed in two orders; the same weights in two libraries."""
    values = np.random.default_rng(0).standard_normal(D).astype("f")
    forward, backward = (np.add.accumulate(v)[-1] for v in (values, values[::-1]))
    x, weights = features(), torch_weights()
    a, b = torch_layer(weights, x), tensorflow_layer(weights, x)
    return found(
        {"a sum of 512 numbers": forward != backward, "both examples": not np.array_equal(a, b)},
        sums=abs(float(forward) - float(backward)),
        outputs=np.abs(a - b).max(),
    )


def significant() -> Found:
    """Is a tenth of the output another, with the same weights in both examples?"""
    x, weights = features(), torch_weights()
    single = apart(tensorflow_layer(weights, x), torch_layer(weights, x))
    half = apart(
        tensorflow_layer(weights, x, dtype="bfloat16"),
        torch_layer(weights, x, dtype=torch.bfloat16),
    )
    rows = [x, x]
    for seed in range(DEEP):
        drawn = torch_weights(seed)
        rows = [layer(drawn, r) for layer, r in zip(LAYERS, rows, strict=True)]
        rows = [(r / r.std()).astype(np.float32) for r in rows]
    deep = apart(*rows)
    holds = {"float32": single > 0.1, "bfloat16": half > 0.1, "float32, deep": deep > 0.1}
    return found(holds, single=single, half=half, deep=deep, layers=DEEP)


PRODUCTS = {
    "torch": "import torch as t; t.ones(20, 512) @ t.ones(512, 512)",
    "tensorflow": "import tensorflow as t; t.ones((20, 512)) @ t.ones((512, 512))",
}


def backends() -> Found:
    """Which library multiplies float32 matrices, by what the libraries log of their calls."""
    logging = {"MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1", "DNNL_VERBOSE": "1"}
    names = {}
    for framework, product in PRODUCTS.items():
        ran = subprocess.run(
            [sys.executable, "-c", product],
            env={**os.environ, **logging},
            check=True,
            capture_output=True,
            text=True,
        )
        lines = (ran.stdout + ran.stderr).splitlines()
        mkl = any(line.startswith("MKL_VERBOSE SGEMM") for line in lines)
        onednn = any(line.startswith("onednn_verbose") and "exec" in line for line in lines)
        names[framework] = "Intel's MKL" if mkl else "oneDNN" if onednn else "its own code"
    return found(
        {
            "on CPU they call different libraries": names["torch"] != names["tensorflow"],
            "on CPU TensorFlow's is its own": names["tensorflow"] == "its own code",
        },
        **names,
    )
