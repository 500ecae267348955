"""Checks of the third document: torch's module and the function that it calls."""

import inspect
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.claims.blog import B, D, F, N, S, T, layer
from experiments.claims.claims import SAME, Found, found
from experiments.claims.printed import apart

FUNCTION, LONG = F.multi_head_attention_forward, 512


def module_is_function() -> Found:
    """The module and torch.nn.functional.multi_head_attention_forward."""
    module, x = layer(), torch.randn(B, T, D)

    def function(**options: Any) -> torch.Tensor:
        rows = x.transpose(0, 1)
        weights = module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0
        last = module.out_proj.weight, module.out_proj.bias
        out = FUNCTION(rows, rows, rows, D, N, *weights, *last, training=False, **options)
        return out[0].transpose(0, 1)

    blocked = torch.zeros(B, T, dtype=torch.bool)
    blocked[0] = True
    with torch.no_grad():
        trained = torch.equal(module(x, x, x, need_weights=False)[0], function(need_weights=False))
        module.eval()
        away = apart(module(x, x, x)[0].numpy(), function().numpy())
        masked = {"need_weights": False, "key_padding_mask": blocked}
        fast, slow = module(x, x, x, **masked)[0][0], function(**masked)[0]
    holds = {
        "off the fast path": trained,
        "on the fast path": away < SAME,
        "on it, a row without keys": torch.equal(fast, slow),
    }
    rows = ["NaN" if out.isnan().all() else "the bias of the output" for out in (fast, slow)]
    return found(holds, apart=away, fast=rows[0], slow=rows[1])


def _given(training: bool, **options: Any) -> dict[str, Any]:
    """Name -> argument of the module's call of `F.multi_head_attention_forward`, if any."""
    module, x = layer(**options).train(training), torch.randn(B, T, D)
    key = torch.randn(B, T, module.kdim)
    with mock.patch.object(F, "multi_head_attention_forward", wraps=FUNCTION) as spy:
        module(x, key if "kdim" in options else x, x, need_weights=False)
    if not spy.called:
        return {}
    given = inspect.signature(FUNCTION).bind(*spy.call_args.args, **spy.call_args.kwargs)
    given.apply_defaults()
    return given.arguments


def calls_function() -> Found:
    """In training, and in inference, where a fast path is taken."""
    with torch.no_grad():
        trained, fast = (bool(_given(training)) for training in (True, False))
    return found({"in training": trained}, fast="called too" if fast else "not called")


def unused_are_none() -> Found:
    """Weights that the function does not use: one packed, or three."""
    three = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    same, other = _given(True), _given(True, kdim=S)
    return found(
        {
            "equal widths": all(same[name] is None for name in three)
            and same["in_proj_weight"] is not None,
            "other widths": other["in_proj_weight"] is None
            and all(other[name] is not None for name in three),
        },
        unused=" and ".join(f"`{name}`" for name in ("in_proj_weight", "q_proj_weight")),
        biases=other["in_proj_bias"].shape[0] // D,
    )


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Sizes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel())
        return out


def materialised() -> Found:
    """The largest tensor that an operation of the layer returns, relative to B N T T."""
    module, x = layer(), torch.randn(1, LONG, D)
    largest = {}
    for asked in (True, False):
        with torch.no_grad(), Made() as made:
            module(x, x, x, need_weights=asked)
        largest[asked] = made.largest
    table = N * LONG * LONG
    return found(
        {
            "with weights there is such a tensor": largest[True] >= table,
            "without there is none": largest[False] < table,
        },
        on=largest[True] / table,
        off=largest[False] / table,
    )


def packed() -> Found:
    """Which parameters are there."""
    same, other = layer(), layer(kdim=S)
    holds = {
        "equal widths": same.in_proj_weight is not None and same.q_proj_weight is None,
        "other widths": other.in_proj_weight is None and other.q_proj_weight is not None,
    }
    return found(holds, shape=str(list(same.in_proj_weight.shape)))
