"""One layer of a large language model on many devices: its programs, and what a device does in them."""

from typing import Any

from experiments.scaling.machines import Work
from tests.sharding.hlo import Collective

LAYOUTS = ("data", "tensor", "ring", "allgather")
# Grouped queries, causal, a batch of 2 million positions.
B, T, N, K, H = 256, 8192, 64, 8, 128
D = N * H
HIDDEN = {"data"}  # sums of gradients run while products do
# Stands for bfloat16, which has its size: what is sent in bfloat16 the CPU would widen.
HALF = "float16"


def lowered(layout: str, devices: int, dtype: str = HALF) -> Any:
    """Forward and backward of the layer for a mesh that is not there."""
    import jax
    import numpy as np

    import jaxmha
    from jaxmha import sharding

    axis: Any = {"ring": "context", "allgather": "context"}.get(layout, layout)
    mesh = jax.make_mesh(
        (devices,), (axis,), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    weights = {axis: axis} if axis != "context" else {}
    rows = {axis: axis} if axis != "tensor" else {}

    def array(shape: tuple[int, ...], spec: Any) -> Any:
        make: Any = jax.ShapeDtypeStruct
        return make(shape, dtype, sharding=sharding.named(mesh, spec))

    shapes = jax.eval_shape(
        lambda: jaxmha.init_params(
            jax.random.key(0), num_heads=N, num_kv_heads=K, features=D, use_bias=False
        )
    )
    # Arrays of one number take no room.
    flat = jax.tree.map(lambda x: np.broadcast_to(np.float32(), x.shape), shapes)
    specs = sharding.specs(flat, mesh=mesh, **weights)
    params = jax.tree.map(lambda x, spec: array(x.shape, spec), shapes, specs)
    x = array((B, T, D), sharding.activations(**rows))
    name = layout if axis == "context" else None

    def step(params: Any, x: Any, cotangent: Any) -> Any:
        def out(params: Any, x: Any) -> Any:
            return jaxmha.multi_head_attention(params, x, is_causal=True, implementation=name)

        found, pull = jax.vjp(out, params, x)
        return found, pull(cotangent)

    with sharding.use(mesh, **{axis: axis}, zigzag=axis == "context"):
        return jax.jit(step).lower(params, x, x)


def sent(collective: Collective, devices: int) -> float:
    """Bytes that a device sends, in rings."""
    size = float(collective.bytes)
    share = (devices - 1) / devices
    return {
        "all-reduce": 2 * size * share,
        "all-gather": size * share,
        "reduce-scatter": size * (devices - 1),
        "all-to-all": size * share,
        "collective-permute": size,
    }[collective.kind]


def work(layout: str, devices: int, found: list[Collective]) -> Work:
    """Of one device. Backward is twice the products of projections, 2.5 times those of scores."""
    parts = devices if layout != "tensor" else 1
    heads = devices if layout == "tensor" else 1
    positions, own = B * T / parts, N / heads
    shared = max(K / heads, 1)  # key/value heads of a device
    projections = 3 * 2 * positions * D * H * (2 * own + 2 * shared)
    scores = 3.5 * 4 * positions * own * H * T / 2
    weights = 2 * D * H * (2 * own + 2 * shared)
    features = 2 * positions * (2 * D + H * (2 * own + 2 * shared))
    moves = sum(sent(c, devices) for c in found if c.kind == "collective-permute")
    others = sum(sent(c, devices) for c in found if c.kind != "collective-permute")
    hidden = others if layout in HIDDEN else 0.0
    return Work(projections + scores, 3 * (weights + features), hidden, others - hidden, moves)
