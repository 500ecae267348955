"""Rotary positions of several coordinates: rows and columns of images, frames of videos.

Sources: `RotaryEmbeddingCat`, `RotaryEmbeddingMixed` and `RotaryEmbeddingDinoV3` of timm 1.0.31;
`WanRotaryPosEmbed` and `LTXVideoRotaryPosEmbed` of diffusers 0.42.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from jaxmha import checkpoint
from jaxmha.arrays import Array, require_arrays
from jaxmha.checks import promoted, reject_rounding
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.rotary import rotate_pairs

# Pattern of architectures of timm -> the arguments of their rotary positions, named as in timm.
_PE = {"rope_grid_indexing": "xy", "rope_grid_offset": 1.0}
_QWEN = {"rope_rotate_half": True}
TIMM: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (r"eva02_(tiny|small|base|large)_", {"ref_feat_shape": 16}),
    (r"vit_\w+_rope_reg\d_gap_256", {"ref_feat_shape": 16}),
    (r"vit_pe_(core|lang|spatial)_gigantic_", {"rope_grid_indexing": "xy", "ref_feat_shape": 32}),
    (r"vit_pe_core_base_patch16_224", {**_PE, "ref_feat_shape": 14}),
    (r"vit_pe_core_", {**_PE, "ref_feat_shape": 24}),
    (r"vit_pe_(lang|spatial)_", {**_PE, "ref_feat_shape": 32}),
    (
        r"vit_(small|base|large)_patch16_rope_mixed_",
        {"rope_grid_indexing": "xy", "rope_type": "mixed"},
    ),
    (
        r"vit_(small|base|large)_patch16_rope_(ape_)?224",
        {"rope_grid_indexing": "xy", "rope_temperature": 100.0},
    ),
    (
        r"vit_\w+_(dinov3|lingbot)(_|$)",
        {"rope_type": "dinov3", "rope_rotate_half": True, "rope_temperature": 100.0},
    ),
    (r"qwen3_vit_", _QWEN),
    (r"deepseek_vit_", _QWEN),
)
# Classes of diffusers whose positions `of` knows.
VIDEOS = ("WanTransformer3DModel", "LTXVideoTransformer3DModel")
MODEL_TYPES = ("timm_rotated", *VIDEOS)
_BLOCK = re.compile(r"^(.*?)blocks[./](\d+)[./]attn$")


class Grid(NamedTuple):
    """The coordinates of the patches of an image or a video.

    `first` is the number of unrotated tokens before the patches. A coordinate is
    `index * scale + offset`, multiplied by `reference` and divided by the size of the image if
    `reference` is given. `centred`: coordinates run from -1 to 1 across the image.
    """

    first: int = 0
    offset: float = 0.0
    scale: float = 1.0
    reference: tuple[float, float] | None = None
    centred: bool = False

    def places(self, *sizes: int) -> NDArray:
        """The A coordinates of all tokens, `T A`, for a grid of A sizes; zeros for unrotated tokens.

        >>> Grid(first=1).places(1, 2).tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
        """
        index = np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij"), -1)
        found = index.reshape(-1, len(sizes)) * self.scale + self.offset
        if self.centred:
            found = (found + 0.5) / sizes * 2 - 1
        elif self.reference is not None:
            found = found / sizes * np.asarray(self.reference)
        return np.concatenate([np.zeros((self.first, len(sizes))), found])


class Planes(NamedTuple):
    """Rotary positions whose angles are sums over several coordinates.

    `inv_freq`, `A N P` or `A 1 P`, is the angle per coordinate, for every head and pair of
    features. `interleaved`: True if pairs are adjacent features; otherwise they are split into
    halves. `grid.places` returns the coordinates. `single`: angles are computed in float32 as in
    the model, because large angles depend on the rounding.
    """

    inv_freq: NDArray
    grid: Grid = Grid()
    interleaved: bool = False
    single: bool = False

    def __call__(
        self, x: Float[Array, "*B T N H"], places: Num[Array, "T A"]
    ) -> Float[Array, "*B T N H"]:
        """Rotates projected queries or keys by the coordinates of every token.

        Raises:
          ValueError: places are not `T A`, or x does not have the heads and pairs of `inv_freq`.
          TypeError: x is not floating.

        >>> Planes(np.ones((2, 1, 2)))(np.ones((1, 6, 2, 4), np.float32), np.zeros((6, 2))).shape
        (1, 6, 2, 4)
        """
        require_arrays(x=x, places=places)
        reject_rounding(x=x)
        promoted(x=x)
        axes, heads, pairs = self.inv_freq.shape
        fits = x.ndim >= 3 and x.shape[-1] >= 2 * pairs and heads in (1, x.shape[-2])
        if not fits or places.shape != (x.shape[-3], axes):
            raise ValueError(
                f"expected x of axes (*B, T, N, H) with N={heads} (1: any) and H of at least "
                f"{2 * pairs}, and places of axes (T, {axes}), got shapes {x.shape} and {places.shape}"
            )
        wide = accumulation_dtype(x.dtype)
        dtype = np.float32 if self.single else wide
        at = jnp.asarray(places).astype(dtype)
        angle = jnp.einsum("ta,anp->tnp", at, self.inv_freq.astype(dtype), precision="highest")
        angle = angle.astype(wide)
        angle = jnp.broadcast_to(angle, (*x.shape[:-2], *angle.shape[1:]))
        return rotate_pairs(x, angle, self.interleaved)


class Square(NamedTuple):
    """Rotary positions by row and column, for heads of any width.

    The first half of the pairs rotate by the row, the others by the column, or the other way round
    (`columns_first`). Pair p of P in each half has frequency `base ** (-p / P)`, times `factor`.
    """

    base: float
    grid: Grid = Grid()
    interleaved: bool = True
    columns_first: bool = False
    factor: float = 1.0

    def at(self, width: int) -> Planes:
        """The positions for heads of `width` features; raises ValueError unless 4 divides it."""
        if width % 4:
            raise ValueError(f"heads must have a multiple of 4 features, got {width}")
        plain = self.factor * self.base ** -(np.arange(width // 4) / (width // 4))
        values = np.kron(np.eye(2), plain)[:, None]  # `A 1 P`: the row, then the column
        return Planes(values[::-1] if self.columns_first else values, self.grid, self.interleaved)

    def __call__(
        self, x: Float[Array, "*B T N H"], places: Num[Array, "T 2"]
    ) -> Float[Array, "*B T N H"]:
        """Rotates projected queries or keys, as `Planes` does.

        >>> Square(100.0)(np.ones((1, 6, 2, 4), np.float32), np.zeros((6, 2))).shape
        (1, 6, 2, 4)
        """
        return self.at(x.shape[-1])(x, places)


def evenly(rotary: Planes | Square, x: Float[Array, "*B T N H"]) -> Array:
    """Rotates x by the coordinates of a square or cube of patches; ValueError if T does not fit."""
    axes = 2 if isinstance(rotary, Square) else len(rotary.inv_freq)
    T, first = x.shape[-3], rotary.grid.first
    side = round(max(T - first, 0) ** (1 / axes))
    if not side or side**axes != T - first:
        raise ValueError(f"{T} tokens are no square or cube of patches: give places to `rotary`")
    return rotary(x, rotary.grid.places(*(side,) * axes))


def of(
    prefix: str, model_type: str, own: Mapping[str, Any], file: checkpoint.Checkpoint
) -> Planes | Square | None:
    """The positions of a block; None if it rotates nothing, such as a pool or cross-attention.

    `own` is the configuration of its model. Raises ValueError for an unknown architecture.
    """
    if model_type == "timm_rotated":
        return _of_timm(prefix, own, file)
    heads, width = own["num_attention_heads"], own["attention_head_dim"]
    if prefix.endswith("attn2"):
        return None
    if model_type == "WanTransformer3DModel":
        return Planes(_of_axes(width), interleaved=True)
    return Planes(_across_heads(heads, width), Grid(scale=2.0, offset=-1.0), True, single=True)


def _of_timm(
    prefix: str, own: Mapping[str, Any], file: checkpoint.Checkpoint
) -> Planes | Square | None:
    name = str(own.get("architecture"))
    rows = next((row for pattern, row in TIMM if re.match(pattern, name)), None)
    if rows is None:
        raise ValueError(f"the rotary positions of architecture {name} are not known")
    if (place := _BLOCK.match(prefix)) is None:  # not in a stack of blocks, such as a pool
        return None
    given = own.get("model_args", own)  # `own` is the whole configuration, or its model_args
    rows = {**rows, **given}
    root, kind = place[1], rows.get("rope_type", "cat")
    first = sum(
        file.info[token].shape[-2] for x in ("cls", "reg") if (token := f"{root}{x}_token") in file.info
    )  # fmt: skip
    columns_first = rows.get("rope_grid_indexing") == "xy"
    if kind == "mixed":
        angles = to_numpy(file[f"{root}rope.freqs"])[:, int(place[2])].astype(np.float64)
        return Planes(angles[::-1] if columns_first else angles, Grid(first), interleaved=True)
    if kind not in ("cat", "dinov3"):
        raise ValueError(f"rotary positions of type {kind} are not known")
    share = rows.get("ref_feat_shape")
    grid = Grid(
        first,
        float(rows.get("rope_grid_offset", 0.0)),
        1.0,
        None if share is None or kind == "dinov3" else tuple(np.broadcast_to(share, 2).tolist()),
        kind == "dinov3",
    )
    return Square(
        float(rows.get("rope_temperature", 10000.0)),
        grid,
        not rows.get("rope_rotate_half"),
        columns_first,
        2 * np.pi if kind == "dinov3" else 1.0,
    )


def _of_axes(width: int) -> NDArray:
    """Frequencies of Wan, `3 1 P`: frames, rows and columns rotate different pairs."""
    side = 2 * (width // 6)
    sizes = (width - 2 * side, side, side)
    rows = [10000.0 ** -(np.arange(0, size, 2) / size) for size in sizes]
    starts = np.cumsum([0, *map(len, rows)])
    found = np.zeros((3, 1, starts[-1]))
    for axis, row in enumerate(rows):
        found[axis, 0, starts[axis] : starts[axis + 1]] = row
    return found


def _across_heads(heads: int, width: int) -> NDArray:
    """Frequencies of LTX, `3 N P`: pairs of all heads rotate by frame, row and column in turn.

    Exponents and powers are rounded to float32 as in the model, because this changes its largest
    angles. The powers may differ in the last digit from powers computed on another platform.
    """
    every = heads * width
    count = every // 6
    ways, last = np.arange(count, dtype=np.float32), np.float32(count - 1)
    step = np.float32(1) / last
    shares = np.where(ways < count // 2, ways * step, np.float32(1) - (last - ways) * step)
    plain = (10000.0 ** shares.astype(np.float64)).astype(np.float32) * np.float32(np.pi / 2)
    found = np.zeros((3, every // 2), np.float32)
    for axis in range(3):
        found[axis, every % 6 // 2 + axis :: 3][:count] = plain
    return found.reshape(3, heads, width // 2)
