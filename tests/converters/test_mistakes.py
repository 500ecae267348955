"""Mistakes that no shape check sees are named, and correct conversions are never accused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxmha import MHAParams, Semantics, multi_head_attention
from jaxmha.converters import keras, mistakes, sides, torch, verify
from jaxmha.converters.arrays import NDArray
from jaxmha.params import from_leaves, leaves

DRAWS = 100
Leaves = dict[str, NDArray]


def draw(rng: np.random.Generator) -> tuple[Leaves, int, int]:
    """Square weights, so that no shape gives a mistake away; N, H >= 2, and N != H."""
    N, H = (int(n) for n in rng.choice([2, 3, 4, 5, 6], size=2, replace=False))
    D = N * H
    shapes = {
        **{f"{role}.kernel": (D, N, H) for role in ("query", "key", "value")},
        **{f"{role}.bias": (N, H) for role in ("query", "key", "value")},
        "out.kernel": (N, H, D),
        "out.bias": (D,),
    }
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}, N, H


def exchanged(x: Leaves, one: str, other: str) -> Leaves:
    swapped = {part: (f"{one}.{part}", f"{other}.{part}") for part in ("kernel", "bias")}
    return x | {a: x[b] for pair in swapped.values() for a, b in (pair, pair[::-1])}


def transposed(x: Leaves, rng: np.random.Generator) -> Leaves:
    name = str(rng.choice([k for k in x if k.endswith("kernel")]))
    D = x["out.bias"].size
    return x | {name: np.ascontiguousarray(x[name].reshape(D, D).T).reshape(x[name].shape)}


def head_order(x: Leaves, rng: np.random.Generator) -> Leaves:
    N = x["query.bias"].shape[0]
    order = np.roll(np.arange(N), int(rng.integers(1, N)))
    return x | {"query.kernel": x["query.kernel"][:, order], "query.bias": x["query.bias"][order]}


def heads_as_sizes(x: Leaves, rng: np.random.Generator) -> Leaves:
    """Rows of every merged axis taken as (H N)."""
    N, H = x["query.bias"].shape
    changed: Leaves = {}
    for role in ("query", "key", "value"):
        kernel, bias = x[f"{role}.kernel"], x[f"{role}.bias"]
        changed[f"{role}.kernel"] = kernel.reshape(-1, H, N).swapaxes(1, 2)
        changed[f"{role}.bias"] = bias.reshape(H, N).T
    return x | changed


def other_count(x: Leaves, rng: np.random.Generator) -> Leaves:
    N, H = x["query.bias"].shape
    counts = [n for n in range(1, N * H + 1) if N * H % n == 0 and n != N]
    state = torch.export_params(from_leaves(dict(x)))
    return dict(leaves(torch.import_params(state, num_heads=int(rng.choice(counts)))[0]))  # type: ignore[arg-type]


def interleaved(x: Leaves, rng: np.random.Generator) -> Leaves:
    """A packed matrix whose rows are head by head is read as torch packs."""
    N, H = x["query.bias"].shape
    state = torch.export_params(from_leaves(dict(x)))
    for key in ("in_proj_weight", "in_proj_bias"):
        rest = state[key].shape[1:]
        state[key] = np.ascontiguousarray(
            state[key].reshape(3, N, H, *rest).swapaxes(0, 1).reshape(3 * N * H, *rest)
        )
    return dict(leaves(torch.import_params(state, num_heads=N)[0]))  # type: ignore[arg-type]


def dropped(x: Leaves, rng: np.random.Generator) -> Leaves:
    name = str(rng.choice([k for k in x if k.endswith("bias")]))
    if rng.random() < 0.5:
        return x | {name: np.zeros_like(x[name])}
    return {k: v for k, v in x.items() if k != name}


INJECTED: dict[str, Callable[[Leaves, np.random.Generator], Leaves]] = {
    "transposed kernel": transposed,
    "query and key exchanged": lambda x, _: exchanged(x, "query", "key"),
    "key and value exchanged": lambda x, _: exchanged(x, "key", "value"),
    "head order": head_order,
    "heads and head size exchanged": heads_as_sizes,
    "wrong head count": other_count,
    "interleaved packing": interleaved,
    "dropped bias": dropped,
}


@pytest.mark.parametrize("name", INJECTED)
@pytest.mark.parametrize("reverse", [False, True], ids=["a to b", "b to a"])
def test_is_named(name: str, reverse: bool) -> None:
    rng, named = np.random.default_rng(0), 0
    for _ in range(DRAWS):
        right, _, _ = draw(rng)
        pair = [from_leaves(dict(x)) for x in (right, INJECTED[name](right, rng))]
        found = mistakes.explain(*(pair[::-1] if reverse else pair))
        named += found is not None and found.startswith(name)
    assert named >= 0.99 * DRAWS


def test_rotary_convention_is_named() -> None:
    rng = np.random.default_rng(0)
    for _ in range(DRAWS):
        x, _, H = draw(rng)
        if H % 2 or H == 2:  # two components are one pair either way
            continue
        order = np.arange(H).reshape(-1, 2).T.ravel()
        changed = x | {k: x[k][..., order] for k in x if k.split(".")[0] in ("query", "key")}
        found = mistakes.explain(from_leaves(dict(x)), from_leaves(dict(changed)))
        assert found is not None
        assert found.startswith("rotary convention")


def test_nothing_correct_is_accused() -> None:
    rng = np.random.default_rng(1)
    for i in range(1000):
        x, N, _ = draw(rng)
        params = from_leaves(dict(x))
        if i % 2:
            again = torch.import_params(torch.export_params(params), num_heads=N)[0]
        else:
            again = keras.import_params(keras.export_params(params))[0]
        assert mistakes.explain(params, again) is None


def test_other_weights_are_not_explained() -> None:
    rng = np.random.default_rng(2)
    for _ in range(DRAWS):
        x, _, _ = draw(rng)
        noise = {k: (v + 1e-3 * rng.normal(size=v.shape)).astype(v.dtype) for k, v in x.items()}
        assert mistakes.explain(from_leaves(dict(x)), from_leaves(dict(noise))) is None


def live(forward: Callable[..., NDArray], params: MHAParams) -> sides.BlockSide:
    """A side whose layer computes something of its own."""
    return sides.BlockSide("", "a layer", params, Semantics(), forward, live=True)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("inverted mask", lambda mask: {"mask": None if mask is None else ~mask}),
        ("mask ignored", lambda mask: {}),
        ("missing scale", lambda mask: {"mask": mask, "semantics": Semantics(scale=1.0)}),
    ],
)
def test_what_a_live_layer_does_is_named(name: str, wrong: Callable[..., dict[str, Any]]) -> None:
    rng, named = np.random.default_rng(3), 0
    for seed in range(20):
        x, _, _ = draw(np.random.default_rng(seed % 3))  # few shapes: each is compiled
        x = {k: rng.normal(size=v.shape).astype(v.dtype) for k, v in x.items()}
        params = from_leaves(dict(x))

        def forward(
            query: NDArray, key: NDArray, value: NDArray, mask: Any, params: MHAParams = params
        ) -> NDArray:
            return np.asarray(multi_head_attention(params, query, key, value, **wrong(mask)))

        report = verify.compare_blocks(live(forward, params), sides.read(params)[0], seed)
        assert not report.same
        named += report.explanation is not None and report.explanation.startswith(name)
    assert named == 20


def test_scale_of_parameters_is_behaviour() -> None:
    x, _, _ = draw(np.random.default_rng(4))
    params = from_leaves(dict(x))
    report = verify.compare((params, Semantics()), (params, Semantics(scale=1.0)))
    assert not report
    assert "scale is None and 1.0" in str(report)
