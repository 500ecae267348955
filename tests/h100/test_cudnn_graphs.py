"""cuDNN has a kernel on an H100 for every graph that it is asked for."""

import inspect
import itertools
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private

import jaxmha
from tests import cudnn_contract
from tests.h100.on_device import CALLS, arrays, program

PADDED = (private.MaskType.PADDING, private.MaskType.PADDING_CAUSAL)
CAUSAL = (private.MaskType.CAUSAL, private.MaskType.PADDING_CAUSAL)
pytestmark = pytest.mark.slow


def asked(patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of cuDNN for each call of the device's suite, with and without gradients and lse."""
    cudnn_contract.install(patch)
    right, right_gradient = private.dot_product_attention, private._dot_product_attention_bwd_rule
    right_paged = private._dot_product_attention
    found: list[dict[str, Any]] = []

    def note(q: Any, k: Any, v: Any, bias: Any, mask_type: Any, **more: Any) -> None:
        shapes = {"query": q.shape, "key": k.shape, "value": v.shape, "bias": bias}
        mask = {"causal": mask_type in CAUSAL, "lengths": mask_type in PADDED}
        usual = {"backward": False, "lse": False, "left": None, "sequences": 0, "pages": 0}
        found.append({"dtype": q.dtype.name, "layout": "BTNH", **usual, **shapes, **mask, **more})

    def forward(q: Any, k: Any, v: Any, bias: Any, *others: Any, **options: Any) -> Any:
        note(
            q, k, v, None if bias is None else bias.shape, options["mask_type"],
            lse=options["return_residual"], layout=options["qkv_layout"],
            left=options["sliding_window_length"],
        )  # fmt: skip
        return right(q, k, v, bias, *others, **options)

    def backward(*arguments: Any) -> Any:
        _, _, _, variadic, mask_type, _, left, *_, saved, _ = arguments
        bias = saved[3].shape if variadic[0] else None
        note(saved[0], saved[1], saved[2], bias, mask_type, backward=True, left=left)
        return right_gradient(*arguments)  # type: ignore[no-untyped-call]

    def primitive(right: Any, *, is_backward: bool) -> Any:
        def bind(q: Any, k: Any, v: Any, *others: Any, mask_type: Any, **static: Any) -> Any:
            sequences = max(others[3].size // len(q) - 1, 0)
            pages = others[5].shape[2] if others[5].ndim == 4 else 0
            note(
                q, k, v, None, mask_type, backward=is_backward, lse=static.get("is_training", False),
                sequences=sequences if sequences > 1 else 0, pages=pages,
            )  # fmt: skip
            return right(q, k, v, *others, mask_type=mask_type, **static)

        return cudnn_contract.Bound(bind)

    def paged(q: Any, k: Any, v: Any, *others: Any, **named: Any) -> Any:
        *_, table, _, _, _, _, _, mask_type, _, _, _, lse = others
        note(q, k, v, None, mask_type, lse=lse, layout="BNTH", pages=table.shape[2])
        return right_paged(q, k, v, *others, **named)

    patch.setattr(private, "dot_product_attention", forward)
    # Their parameters are read by their names.
    backward.__signature__ = inspect.signature(right_gradient)  # type: ignore[attr-defined]
    paged.__signature__ = inspect.signature(right_paged)  # type: ignore[attr-defined]
    patch.setattr(private, "_dot_product_attention_bwd_rule", backward)
    patch.setattr(private, "_dot_product_attention", paged)
    for name, run, is_backward in (
        ("_dot_product_attention_fwd_p", cudnn_contract.packed, False),
        ("_dot_product_attention_bwd_p", cudnn_contract.packed_backward, True),
    ):
        patch.setattr(private, name, primitive(run, is_backward=is_backward))
    with jaxmha.lowering_for("h100"):
        for call in CALLS:
            for dtype in ("bfloat16", "float16"):
                exact, cotangents = jax.tree.map(
                    lambda x, to=dtype: jnp.asarray(x, to), arrays(call, dtype)
                )
                cotangents["lse"] = cotangents["lse"].astype(jnp.float32)
                for lse in (False, True):
                    options: Any = {"mask": call.mask, "return_lse": lse, "implementation": "cudnn"}
                    if jaxmha.explain(**exact, **options).reasons[0][1] is None:
                        jax.eval_shape(program(call, "cudnn", lse=lse), exact, cotangents)
                        jax.eval_shape(
                            lambda x, o=options: jaxmha.dot_product_attention(**x, **o), exact
                        )

        for dtype, T, H in itertools.product(("bfloat16", "float16"), (1, 4), (64, 128)):
            jax.eval_shape(partial(steps, dtype, T, H))
    return found


def steps(dtype: str, T: int, H: int) -> Any:
    """Steps over a cache, its window, and its pages."""
    params = jaxmha.init_params(
        jax.random.key(0), num_heads=8, num_kv_heads=2, head_dim=H, features=64, dtype=dtype
    )
    x = jnp.zeros((2, T, 64), dtype)
    caches: tuple[Any, ...] = (
        jaxmha.KVCache.empty(params, 2, 2048),
        jaxmha.PagedKVCache.empty(params, 2, 2048, pages=99, page_size=64),
    )
    masks = None, jaxmha.Mask.window(500, 0)
    return [jaxmha.decode_step(params, x, cache, mask=m) for cache in caches for m in masks]


def test_every_graph_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("cudnn") is None or shutil.which("cc") is None:
        pytest.skip("cuDNN's frontend, or a C compiler, is not installed")
    calls = [json.loads(x) for x in {json.dumps(x, sort_keys=True) for x in asked(monkeypatch)}]
    assert len(calls) > 200
    pages, packed = (next(x for x in calls if x[kind]) for kind in ("pages", "sequences"))
    # JAX rejects the first in a gradient, and jaxmha avoids it: the check itself must notice.
    refused = {**calls[0], "backward": True, "query": (2, 1, 4, 64), "key": (2, 1, 4, 64),
               "value": (2, 1, 4, 64), "bias": None, "causal": False, "lengths": True,
               "left": None, "layout": "BTNH", "sequences": 0, "pages": 0}  # fmt: skip
    wrong = [refused, {**pages, "lengths": False}, {**packed, "lengths": False}]
    (cudnn,) = find_spec("nvidia.cudnn").submodule_search_locations  # type: ignore[union-attr, misc]
    done = subprocess.run(
        [sys.executable, "-m", "tests.h100.cudnn_graphs"], env={**os.environ, "LD_LIBRARY_PATH": f"{cudnn}/lib"},
        input=json.dumps([*calls, *wrong]), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(wrong), found
