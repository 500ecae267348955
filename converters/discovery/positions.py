"""Reads rotary, ALiBi and relative positions of attention blocks from config.json and tensors.

`all_positions.positions_of` returns, for every block, the parameters with which jaxmha computes its
positions.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxmha import checkpoint, rope, rotary_frequencies
from jaxmha.arrays import Array
from jaxmha.checkpoint.errors import printable
from jaxmha.converters.discovery import (
    architectures,
    axial,
    behaviours,
    described,
    disentangled,
    hf_config,
    layer_kinds,
    masked_types,
    planes,
    query_scale,
    relative,
    rotary_settings,
)
from jaxmha.converters.discovery.added_terms import Term, alibi
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.axial import Axial
from jaxmha.converters.discovery.disentangled import Disentangled
from jaxmha.converters.discovery.head_count import Configured
from jaxmha.converters.discovery.notes import counted
from jaxmha.converters.discovery.planes import Planes, Square
from jaxmha.converters.discovery.query_scale import QueryPower, QueryScale
from jaxmha.converters.layout.arrays import NDArray, to_numpy

# Key of safetensors metadata, followed by `.PREFIX`: the scheme of a block in words.
METADATA = "jaxmha.positions"
SCALED = "queries multiplied by factors of positions"
# Model types whose rotary positions rotate pairs of neighbouring features.
INTERLEAVED = frozenset((
    "blt_global_transformer", "blt_local_decoder", "blt_local_encoder", "blt_patcher", "codegen",
    "cohere", "cohere2", "cohere2_moe", "cohere_asr", "ernie4_5", "ernie4_5_moe",
    "ernie4_5_vl_moe_text", "glm", "glm4", "glm4v_text", "glm_ocr_text", "gptj",
    "gradium_phonon_tts", "helium", "llama4_text", "moonshine", "moonshine_streaming",
    "openai_privacy_filter", "pe_audio_encoder", "roformer",
))  # fmt: skip
# Model types whose rotary positions are rows and columns, or times, instead of token indices: those
# that are not in `axial.FORMS` are unknown.
PLANES = frozenset((
    "dinov3_vit", "eomt_dinov3", "pixtral", "sam3_vit_model", "neomme",
    "efficientloftr", "lightglue", "edgetam_video", "sam2_video", "sam3_tracker_video", "vjepa2",
    "HunyuanDiT2DModel", "StableAudioDiTModel",
))  # fmt: skip
# Layout and model type of the authors' own files, which rotate pairs of adjacent features. In files of
# transformers, the same model rotates the two halves of a head.
_PERMUTED = (("linear-wo", "pixtral"), ("linear-wqkv-wo", "kimi_k25_vision"))
# Model types that `architectures` lists as rotary, but whose attention blocks are not rotated.
_NOWHERE = (
    "nemotron_h", "clvp_decoder", "cohere_asr", "idefics_vision", "neucodec", "xcodec2",
)  # fmt: skip
_ROTATED_ACROSS = ("edgetam_video", "sam2_video", "sam3_tracker_video")
# Model types with relative positions in some blocks, and rotary positions in all others.
_BOTH = ("phi4_multimodal", "deepseek_ocr2_text", "unlimited_ocr_text")
# Model types whose relative positions are tensors of the blocks: blocks without them have none.
_IN_BLOCKS = ("seamless_m4t", "seamless_m4t_v2", "mask2former", "oneformer")
# Model types that rotate by negative angles.
BACKWARD = frozenset(["nanochat"])
# Model types that have rotary positions only where position_embedding_type is "rope".
OPTIONAL = frozenset(["granitemoehybrid"])
# Arrays of a block with its rotary frequencies, for models that pair the two halves of a head:
# fair-esm, and early files of Llama.
_ANGLES = ("rot_emb.inv_freq", "rotary_emb.inv_freq")
_NOT_KNOWN = "is not known here"
_GIVEN = "positions_of(folder) of jaxmha.converters gives what computes them"


class Rotary(NamedTuple):
    """Rotary positions: the angle per position of every pair of features.

    `kind` is the rope type of the configuration, and `base` its theta. Features after the pairs are
    not rotated. `factor` multiplies cosine and sine. `length`: the longest sequence with these
    frequencies, if longer sequences have others; None: there is no limit, or the caller gave a length.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False
    factor: float = 1.0
    kind: str = "default"
    base: float = 10000.0
    length: int | None = None

    def __call__(
        self, x: Float[Array, "*B T N H"], positions: Int[Array, "*#B T"]
    ) -> Float[Array, "*B T N H"]:
        """Rotates projected queries or keys by their positions.

        >>> Rotary((1.0, 0.1))(np.ones((1, 3, 2, 4), np.float32), np.arange(3)).shape
        (1, 3, 2, 4)
        """
        frequencies = rotary_frequencies.Frequencies(self.inv_freq, self.factor)
        return rope(x, positions, frequencies=frequencies, interleaved=self.interleaved)


class Positions(NamedTuple):
    """The positional encoding of one block.

    `scheme` is "none", "rotary", "axial" (by several coordinates), "alibi", "relative" or "unknown".
    `rotary` has the parameters of "rotary" and "axial"; `added` has the bias of "alibi"
    and "relative". `why` is the reason for "none" or "unknown". `query_scale` multiplies the queries
    before they are rotated.
    """

    scheme: str
    rotary: Rotary | Axial | Planes | Square | None = None
    added: Term | Disentangled | None = None
    why: str = ""
    query_scale: QueryScale | QueryPower | None = None

    @property
    def applied(self) -> bool:
        """True if the model applies known positions to queries, keys or logits."""
        return self.scheme not in ("none", "unknown") or self.query_scale is not None

    def __str__(self) -> str:
        """The scheme in words, as notes and the metadata of files have it."""
        if self.query_scale is not None:
            return f"{self._replace(query_scale=None)}, {SCALED}"
        if isinstance(self.rotary, Rotary):
            kind = "" if self.rotary.kind == "default" else f", scaling {self.rotary.kind}"
            pairs = "neighbouring features" if self.rotary.interleaved else "halves"
            width, most = 2 * len(self.rotary.inv_freq), self.rotary.length
            kind += (
                "" if most is None else f", up to {most} tokens (beyond, by positions_of length=)"
            )
            return f"rotary, base {self.rotary.base:g}, {width} features in pairs of {pairs}{kind}"
        if isinstance(self.rotary, Axial):
            return f"rotary by row and column, {2 * len(self.rotary.inv_freq)} features"
        if self.rotary is not None:
            return "rotary by the coordinates of patches"
        if self.added is not None:
            return f"{self.scheme} ({type(self.added).__name__}, added to the logits)"
        return f"{self.scheme}, {self.why}" if self.why else self.scheme


def of_blocks(
    file: checkpoint.Checkpoint,
    blocks: Sequence[Block],
    heads: Configured | None = None,
    length: int = 0,
) -> dict[str, Positions]:
    """The positional encoding of blocks of an open checkpoint, by prefix.

    `heads`: the head counts of its configuration, if the caller has read them. `length`: the longest
    sequence, on which frequencies of some rope types depend; 0: the trained length.
    """
    configured = heads
    if heads is None and typed(file):  # without a model type, no scheme needs the head count
        configured = described.of(file, blocks).heads
    content = hf_config.readable(file.path)
    return {block.prefix: _of_block(block, content, configured, file, length) for block in blocks}


def notes(file: checkpoint.Checkpoint, found: Mapping[str, Positions]) -> Iterator[str]:
    """Yields one note for all blocks with the same scheme, if it changes their attention or may.

    It may if the scheme of a known model type is unknown; unknown model types have no note.
    """
    schemes: dict[tuple[str, bool], list[str]] = {}
    for prefix, one in found.items():
        if one.applied or (one.scheme == "unknown" and not one.why.endswith(_NOT_KNOWN)):
            schemes.setdefault((str(one), one.applied), []).append(prefix)
    for (scheme, applied), prefixes in schemes.items():
        yield printable(f"positions of {counted(prefixes)}: {scheme}" + f"; {_GIVEN}" * applied)


def to_metadata(
    file: checkpoint.Checkpoint, found: Mapping[str, Positions], sources: Mapping[str, str]
) -> dict[str, str]:
    """Metadata that names the scheme of every block, by prefix in the destination.

    A scheme that neither a configuration nor a tensor determines has the words of the source's own
    metadata. The result is empty if no scheme is known.

    `found`: prefix in the source -> scheme. `sources`: prefix in the destination -> in the source.
    """
    known = typed(file) or any(one.scheme != "unknown" for one in found.values())
    before = stated(file)
    texts = dict[str, str]()
    for target, source in sources.items():
        text = str(found[source]) if known else ""
        texts[target] = before.get(source, text) if found[source].scheme == "unknown" else text
    return {f"{METADATA}.{target}": text for target, text in texts.items() if text}


def stated(file: checkpoint.Checkpoint) -> dict[str, str]:
    """The positions of blocks in words, by prefix, as the metadata of a converted file has them."""
    key = f"{METADATA}."
    return {k.removeprefix(key): v for k, v in file.metadata.items() if k.startswith(key)}


def typed(file: checkpoint.Checkpoint, heads: Configured | None = None) -> bool:
    """True if the configuration next to a checkpoint names a model type.

    `heads`: its head counts; if they are wrong, it describes other tensors, and the result is False.
    """
    if heads and heads.wrong:
        return False
    content = hf_config.readable(file.path)
    return any(t for _, t in hf_config.search(content, ["model_type"]))


# File names of checkpoints in folders of published models, in order of preference.
_FILES = (
    "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)  # fmt: skip
_SUFFIXES = (".safetensors", ".bin", ".pt", ".npz", ".h5", ".keras")


def in_folder(path: Path) -> Path:
    """The checkpoint itself, or the only one in a folder; ValueError if the folder has several."""
    if not path.is_dir():
        return path
    named = [path / name for name in _FILES if (path / name).is_file()]
    files = named[:1] or sorted(x for x in path.iterdir() if x.suffix in _SUFFIXES)
    if len(files) > 1:
        raise ValueError(
            f"{path} has several checkpoints ({files[0].name}, {files[1].name}): name one"
        )
    return files[0] if files else path  # the folder itself may be a checkpoint, such as orbax


def _of_block(
    block: Block,
    content: Any,
    configured: Configured | None,
    file: checkpoint.Checkpoint,
    length: int,
) -> Positions:
    count = configured.part_of(block.prefix) if configured else None
    found_part = behaviours.part_of(content, count, block.prefix)
    own, model_type = found_part or behaviours.part(content, ())
    if not model_type or model_type not in architectures.KNOWN:
        if (term := relative.table(block, file)) is not None:
            return Positions("relative", added=term)
        if not model_type and (rotary := _by_tensor(block, file)) is not None:
            return Positions("rotary", rotary)
        return Positions("unknown", why=f"model_type {model_type or '(none)'} {_NOT_KNOWN}")
    heads = None if count is None else count.heads
    try:
        has_scale = "query_scale" in architectures.parts(model_type)
        scaled = query_scale.of(own, behaviours.layer_of(block.prefix)) if has_scale else None
        found = _of_parts(block, own, model_type, heads, file, length)
        return found if scaled is None else found._replace(query_scale=scaled)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        return Positions("unknown", why=f"{model_type}: {error}")


def _of_parts(
    block: Block,
    own: Mapping[str, Any],
    model_type: str,
    heads: int | None,
    file: checkpoint.Checkpoint,
    length: int,
) -> Positions:
    """The positions of a block whose model type is known."""
    parts = architectures.parts(model_type)
    if model_type in disentangled.MODEL_TYPES:
        terms = disentangled.of(block, own, heads, file)
        return Positions("none") if terms is None else Positions("relative", added=terms)
    if "relative" in parts and relative.is_across(block):
        return Positions("none", why="attention across has none")
    if "relative" in parts and (term := relative.of(block, own, file)) is not None:
        return Positions("relative", added=term)
    if "relative" in parts and model_type in _IN_BLOCKS:
        return Positions("none")
    if "relative" in parts and model_type not in (*_BOTH, *_NOWHERE):
        raise ValueError("its relative positions have no form here")
    if own.get("position_embedding_type") in ("absolute", "learned", "nope"):
        return Positions("none", why=f"position_embedding_type of {hf_config.CONFIG}")
    if "alibi" in parts or own.get("alibi") is True:
        if heads is None:
            raise ValueError("its head count is not known")
        return Positions("alibi", added=alibi(heads, model_type, own))
    if re.search(masked_types.ACROSS, block.prefix) and model_type in _ROTATED_ACROSS:
        raise ValueError("its attention across rotates by rows and columns, and not every key")
    if "rotary" in parts and re.search(masked_types.ACROSS, block.prefix):
        return Positions("none", why="attention across has none")
    if "rotary" in parts and model_type not in _NOWHERE:
        return _rotary(block, own, model_type, heads, file, length)
    return Positions("none")


def _rotary(
    block: Block,
    own: Mapping[str, Any],
    model_type: str,
    heads: int | None,
    file: checkpoint.Checkpoint,
    length: int,
) -> Positions:
    if model_type in planes.MODEL_TYPES:
        placed = planes.of(block.prefix, model_type, own, file)
        return Positions("axial", placed) if placed is not None else Positions("none")
    form = axial.form_of(model_type)
    if model_type in PLANES and not form:
        raise ValueError("its rotary positions count rows and columns")
    layer = behaviours.layer_of(block.prefix)
    if not layer_kinds.rotated(own, model_type, layer):
        return Positions("none", why="the layer has no rotary positions")
    if own.get("use_mem_rope") is False:
        return Positions("none", why="use_mem_rope is false")
    if model_type in OPTIONAL and own.get("position_embedding_type") != "rope":
        return Positions("none", why="position_embedding_type is not rope")
    rows = file.info[block.keys[block.layout.entries[0].key]].shape
    width = own.get("head_dim") or (max(rows) // heads if heads else None)
    keys = axial.FEATURES.get(model_type, ("hidden_size", "n_embd"))
    features = [own[k] for k in keys if isinstance(own.get(k), int)]
    if own.get("head_dim") is None and heads and features:
        width = features[0] // heads
    if type(width) is not int:
        raise ValueError("the width of its heads is not known")
    if not 0 < width <= max(rows):
        raise ValueError(f"heads of {width} features do not fit a projection of shape {rows}")
    rope_ = rotary_settings.of(own, model_type, layer)
    if own.get("rope_local_base"):
        raise ValueError("its layers have two bases")
    if form:
        found = axial.of(model_type, own, width, float(rope_["rope_theta"]), layer)
        if (block.layout.name, model_type) in _PERMUTED:
            found = found._replace(interleaved=True)
        return Positions("axial", found)
    frequencies = rotary_settings.frequencies(own, rope_, model_type, width, length)
    return Positions(
        "rotary",
        Rotary(
            tuple(-x for x in frequencies.values) if model_type in BACKWARD else frequencies.values,
            model_type in INTERLEAVED or (model_type == "litgpt" and own["rope_interleave"]),
            frequencies.factor,
            str(rope_["rope_type"]),
            float(rope_["rope_theta"]),
            None if length else rotary_settings.trained_length(own, rope_),
        ),
    )


def _by_tensor(block: Block, file: checkpoint.Checkpoint) -> Rotary | None:
    """Rotary positions whose frequencies are a tensor of the block (`_ANGLES`); None without it."""
    names = [n for end in _ANGLES if (n := f"{block.prefix}.{end}") in file.info]
    if not names or len(file.info[names[0]].shape) != 1:
        return None
    return Rotary(tuple(to_numpy(file[names[0]]).astype(np.float64).tolist()))


def turned(
    positions: Positions, query: Array, key: Array
) -> tuple[jax.Array | Array, jax.Array | Array]:
    """Rotates projected queries `*B T N H` and keys `*B S K H` by the positions 0, 1, 2, ...

    For axial positions, the tokens are the patches of square images of one size, or of a cube.
    Queries and keys are returned unchanged if the block has no rotary positions.

    Raises:
      ValueError: the number of tokens does not fit square images.
    """
    T, S = query.shape[-3], key.shape[-3]
    if positions.query_scale is not None:
        query = positions.query_scale(query, np.arange(T))
    if positions.rotary is None:
        return query, key
    if isinstance(positions.rotary, Axial):
        return (
            positions.rotary(query, squares(positions.rotary, T)),
            positions.rotary(key, squares(positions.rotary, S)),
        )
    if isinstance(positions.rotary, Planes | Square):
        return planes.evenly(positions.rotary, query), planes.evenly(positions.rotary, key)
    return positions.rotary(query, np.arange(T)), positions.rotary(key, np.arange(S))


def squares(rotary: Axial, T: int) -> NDArray:
    """Rows and columns, `T 2`, of the patches of square images; ValueError if T does not fit."""
    for images in range(1, T + 1):
        patches = T // images - rotary.first - rotary.last
        side = math.isqrt(max(patches, 0))
        if T % images == 0 and side * side == patches > 0 and side % rotary.merge == 0:
            return np.tile(rotary.places(side, side), (images, 1))
    raise ValueError(f"{T} tokens are not the patches of square images: give places to `rotary`")
