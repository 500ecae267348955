"""Rotary positions of two coordinates: the row and the column of every patch of an image."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from jaxmha.arrays import Array, require_arrays
from jaxmha.checks import promoted, reject_rounding
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.rotary import rotate_pairs

# Form -> model types. A form says which coordinate, row or column, rotates which feature pairs.
FORMS: dict[str, str] = {
    "rows, then columns": (
        "glm4v_vision glm46v_vision glm4v_moe_vision glm_ocr_vision glm5_next_vision glmga_vision "
        "qwen2_vl_vision qwen2_5_vl_vision qwen3_vl_vision qwen3_vl_moe_vision qwen3_5_vision "
        "qwen3_5_moe_vision qwen4_exp_vision exaone4_5_vision ernie4_5_vl_moe_vision "
        "paddleocr_vl_vision video_llama_3_vision cohere_compass_vision "
        "qwen2_5_omni_vision_encoder qwen3_omni_moe_vision_encoder dots3_note_vision_encoder "
        "lfm3_vl_vision"
    ),
    "columns, then rows": "muse_spark_vision muse_glimmer_vision",
    "even and odd": "pixtral",
    "pairs of columns, then rows": "sam3_vit_model inkling2_vision llama4_vision_model",
    "columns and rows in turn": "kimi_k25_vision",
    "shares of the image": "dinov3_vit eomt_dinov3 sapiens2",
}
# Model type -> configuration key for the number of register tokens after the class token; "" if
# there are none.
CLASSED = {"inkling2_vision": ""} | dict.fromkeys(("dinov3_vit", "sapiens2"), "num_register_tokens")
CLASSED_LAST = ("llama4_vision_model",)  # their class token follows the patches
# Model type -> keys of its width, if hidden_size is the width of its output instead.
FEATURES = {"qwen2_vl_vision": ("embed_dim",)}
_MERGE = "spatial_merge_size"  # key of `Axial.merge` in a configuration
# Model types whose patches are in rows, not in squares: they merge squares after the blocks.
_IN_ROWS = ("paddleocr_vl_vision",)


class Axial(NamedTuple):
    """Rotary positions of rows and columns.

    `inv_freq`: the angle per row or column, for every pair of features. `axis`: 0 for pairs that
    rotate by the row, 1 for the column. `interleaved`: True if pairs are adjacent features;
    otherwise they are split into halves. `merge`: squares of `merge x merge` patches are
    contiguous. `first`, `last`: the numbers of unrotated tokens before and after the patches.
    `centred`: coordinates run from -1 to 1 across the image; otherwise they are integers, from 1 if
    any token is unrotated.
    """

    inv_freq: tuple[float, ...]
    axis: tuple[int, ...]
    interleaved: bool = False
    merge: int = 1
    first: int = 0
    centred: bool = False
    last: int = 0

    def __call__(
        self, x: Float[Array, "*B T N H"], places: Num[Array, "T 2"]
    ) -> Float[Array, "*B T N H"]:
        """Rotates projected queries or keys by the row and column of every token (see `places`).

        Raises:
          ValueError: places are not `T 2`, or heads have fewer features than the pairs.
          TypeError: x is not floating.

        >>> Axial((1.0, 1.0), (0, 1))(np.ones((1, 6, 2, 4), np.float32), grid(2, 3)).shape
        (1, 6, 2, 4)
        """
        require_arrays(x=x, places=places)
        reject_rounding(x=x)
        promoted(x=x)
        pairs = len(self.inv_freq)
        if x.ndim < 3 or x.shape[-1] < 2 * pairs or places.shape != (x.shape[-3], 2):
            raise ValueError(
                f"expected x of axes (*B, T, N, H) with H of at least {2 * pairs}, and places of "
                f"axes (T, 2), got shapes {x.shape} and {places.shape}"
            )
        dtype = accumulation_dtype(x.dtype)
        at = jnp.asarray(places)[:, np.asarray(self.axis)].astype(dtype)
        angle = (at * np.asarray(self.inv_freq, dtype)[None])[:, None]
        return rotate_pairs(
            x, jnp.broadcast_to(angle, (*x.shape[:-2], *angle.shape[1:])), self.interleaved
        )

    def places(self, height: int, width: int) -> NDArray:
        """Row and column of every token, `T 2`; (0, 0) for unrotated tokens."""
        found = grid(height, width, self.merge)
        if self.centred:
            found = (found + 0.5) / (height, width) * 2 - 1
        elif self.first or self.last:
            found = found + 1
        return np.pad(found, ((self.first, self.last), (0, 0)))


def grid(height: int, width: int, merge: int = 1) -> NDArray:
    """Row and column of every patch, `T 2`; squares of `merge x merge` patches are contiguous.

    >>> grid(2, 2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    found = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1)
    squares = found.reshape(height // merge, merge, width // merge, merge, 2)
    return np.asarray(squares.swapaxes(1, 2).reshape(-1, 2))


def form_of(model_type: str) -> str:
    """How the vision model rotates by rows and columns, a key of `FORMS`; "" if it is not known.

    >>> form_of("pixtral")
    'even and odd'
    """
    return next((form for form, types in FORMS.items() if model_type in types.split()), "")


def of(
    model_type: str, own: Mapping[str, Any], width: int, base: float, layer: int | None
) -> Axial:
    """The axial positions of a layer.

    Args:
      model_type: selects the form, see `FORMS`.
      own: the configuration of this part of the model.
      width: features of one head.
      base: the rope theta.
      layer: index of the layer, if its prefix has one.

    Raises:
      ValueError: `width` is not a multiple of 4, or the model type is not known.
    """
    form = form_of(model_type)
    if not form or width % 4:
        raise ValueError(f"no axial form of {model_type} with heads of {width} features is known")
    quarter = width // 4
    plain = base ** -(np.arange(0, width // 2, 2) / (width // 2))
    values, axis = np.tile(plain, 2), np.repeat([0, 1], quarter)
    if form == "even and odd":
        whole = base ** -(np.arange(0, width, 2) / width)
        values = np.concatenate([whole[0::2], whole[1::2]])
    elif form.endswith("columns, then rows"):
        axis = 1 - axis
    elif form == "columns and rows in turn":
        values, axis = np.repeat(plain, 2), np.tile([1, 0], quarter)
    elif form == "shares of the image":
        values = 2 * np.pi * np.tile(base ** -np.arange(0, 1, 4 / width), 2)
    first = 0
    if model_type in CLASSED:
        first = 1 + int(own.get(CLASSED[model_type]) or 0)
    return Axial(
        tuple(float(x) for x in values * _stretch(own, layer)),
        tuple(map(int, axis)),
        form.startswith("pairs"),
        own[_MERGE] if type(own.get(_MERGE)) is int and model_type not in _IN_ROWS else 1,
        first,
        form == "shares of the image",
        int(model_type in CLASSED_LAST),
    )


def _stretch(own: Mapping[str, Any], layer: int | None) -> float:
    """The position step between adjacent patches.

    It is 1, except in global layers of SAM 3: there, the positions of the whole image run as far as
    those of a window in other layers.
    """
    whole = own.get("global_attn_indexes")
    if not isinstance(whole, list) or layer not in whole:
        return 1.0
    return float(own["window_size"]) / float(own["image_size"] // own["patch_size"])
