"""Random weights with biases and norms that matter, and small inputs for any model."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from tests.zoo.inputs import INPUTS

BATCH, LENGTH, TARGET = 2, 12, 7
_KEPT = ("A_log", "dt_bias", "D", "lambda", "inv_freq", "time_step")  # not free to draw


def draw_weights(model: Any, seed: int) -> None:
    """Draws every floating parameter: matrices by their fan-in, norms around 1, biases around 0."""
    generator = torch.Generator().manual_seed(seed)
    fixed = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if "Sinusoid" in type(module).__name__
        for name, _ in module.named_parameters(recurse=False)
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in fixed:
                continue
            last = name.rpartition(".")[2]
            if not parameter.is_floating_point() or any(last.startswith(k) for k in _KEPT):
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.ndim >= 2:
                fan = max(parameter.numel() // max(len(parameter), 1), 1)
                parameter.copy_(noise * 1.2 * min(fan, 512) ** -0.5)
            elif "weight" in last or last in ("scale", "gamma"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim:
                parameter.copy_(0.2 * noise)


def feeds(model: Any, model_type: str) -> Iterator[dict[str, Any]]:
    """Arguments to try for a forward call of a model, the most complete first."""
    torch.manual_seed(7)
    own = INPUTS.get(model_type) or INPUTS.get(type(model).__name__)
    if own is not None:
        yield own(model.config)
        return
    names = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    needed = {
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if name in names and parameter.default is inspect.Parameter.empty
    }
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) and main in names else next(iter(names))
    decoder = {}
    if "decoder_input_ids" in names:
        decoder = {"decoder_input_ids": ids(model.config, TARGET)}
    if grid := next((name for name in ("grid_thw", "image_grid_thw") if name in needed), ""):
        for count in (2 * 16, 16):
            yield {main: patches(model.config, count), grid: _grid(model.config, {})[: count // 16]}
    kinds = [kind for kind in (main, *names) if kind in _MAKERS]
    for kind in dict.fromkeys(kinds):
        for made in _MAKERS[kind](model.config, kind):
            beside: dict[str, Any] = {}
            for name in needed - {kind}:
                if name in _MAKERS:
                    beside |= next(iter(_MAKERS[name](model.config, name)))
                elif name in _NEEDED:
                    beside[name] = _NEEDED[name](model.config, made)
            if kind == "input_ids" and "bbox" in names:
                beside["bbox"] = _NEEDED["bbox"](model.config, made)
            masks: list[dict[str, Any]] = [{}]
            if kind == "input_ids" and "attention_mask" in names:
                mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
                mask[1, LENGTH - 3 :] = 0
                masks = [{"attention_mask": mask}, {}]
            inputs = made | beside | decoder
            yield from (inputs | masked for masked in masks)
            if kind == "input_ids" and "pixel_values" in names:
                images = {"pixel_values": pixels(model.config)}
                yield from (inputs | images | masked for masked in masks)
    width = _first(model.config, "hidden_size", 16)
    for shape in ((BATCH, LENGTH, width), (BATCH, width)):
        yield {main: torch.randn(shape)} | decoder


def _texts(config: Any, name: str) -> Iterator[dict[str, Any]]:
    yield {name: ids(config, LENGTH)}


def _images(config: Any, name: str) -> Iterator[dict[str, Any]]:
    for frames in (0, *{_first(config, "num_frames", 4), 2}):
        yield {name: pixels(config, frames)}
    yield from _patches(config, name)


def _patches(config: Any, name: str) -> Iterator[dict[str, Any]]:
    yield {name: patches(config, 32)}


def _sounds(config: Any, name: str) -> Iterator[dict[str, Any]]:
    for sound in sounds(config, name):
        yield {name: sound}


_MAKERS = {
    "input_ids": _texts, "pixel_values": _images, "pixel_values_videos": _images,
    "input_features": _sounds, "input_values": _sounds, "audio_values": _sounds,
    "audio_mel": _sounds,
}  # fmt: skip


def _ones(config: Any, made: dict[str, Any]) -> Any:
    first = next(iter(made.values()))
    return torch.ones(first.shape[:2], dtype=torch.long)


def _states(config: Any, made: dict[str, Any]) -> Any:
    width = _first(config, "encoder_hidden_size", None) or _first(config, "hidden_size", 16)
    return torch.randn(BATCH, 9, width)


def _places(config: Any, made: dict[str, Any]) -> Any:
    return torch.tensor([[4, 4]] * BATCH)


def _grid(config: Any, made: dict[str, Any]) -> Any:
    return torch.tensor([[1, 4, 4]] * BATCH)


def _boxes(config: Any, made: dict[str, Any]) -> Any:
    return torch.sort(torch.randint(0, 60, (BATCH, LENGTH, 4)), dim=-1).values


_NEEDED = {
    "input_features_mask": _ones, "encoder_hidden_states": _states, "pixel_attention_mask": _ones,
    "spatial_shapes": _places, "attention_mask": _ones, "audio_mel_mask": _ones, "grid_thw": _grid,
    "image_grid_thw": _grid, "bbox": _boxes,
}  # fmt: skip


def _first(config: Any, name: str, default: Any) -> Any:
    """A setting of a configuration, or of the first part of it that has the setting."""
    for one in (config, *_parts(config)):
        value = getattr(one, name, None)
        if value is not None:
            return value
    return default


def _parts(config: Any) -> Iterator[Any]:
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield value
            yield from _parts(value)


def ids(config: Any, length: int) -> Any:
    """Token numbers that are no special tokens."""
    content = config.to_dict()
    special: set[int] = set()
    todo = [content]
    while todo:
        for key, value in todo.pop().items():
            if isinstance(value, dict):
                todo.append(value)
            elif "token" in str(key):
                special |= {
                    x for x in (value if isinstance(value, list) else [value]) if type(x) is int
                }
    vocabulary = _first(config, "vocab_size", 30)
    vocabulary = vocabulary if isinstance(vocabulary, int) else min(vocabulary)
    free = [i for i in range(3, max(vocabulary, 8)) if i not in special and i < vocabulary] or [0]
    return torch.tensor(free)[torch.randint(0, len(free), (BATCH, length))]


def _size(config: Any) -> tuple[int, int]:
    size = _first(config, "image_size", 64)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    return tuple(size)[-2:] if isinstance(size, list | tuple) else (size, size)


def pixels(config: Any, frames: int = 0) -> Any:
    channels = _first(config, "num_channels", None) or _first(config, "in_channels", None) or 3
    channels = channels if isinstance(channels, int) and channels < 12 else 3
    return torch.randn(BATCH, *([frames] if frames else []), channels, *_size(config))


def patches(config: Any, count: int) -> Any:
    """Flattened patches, as vision towers of any resolution take them."""
    patch = _first(config, "patch_size", 14)
    patch = patch if isinstance(patch, int) else patch[0]
    channels = _first(config, "in_channels", None) or _first(config, "num_channels", None) or 3
    return torch.randn(count, channels * _first(config, "temporal_patch_size", 1) * patch * patch)


def sounds(config: Any, name: str) -> Iterator[Any]:
    bins = next(
        (
            value
            for key in (
                "num_mel_bins",
                "feature_size",
                "input_dim",
                "input_feat_per_channel",
                "n_mels",
            )
            if isinstance(value := _first(config, key, None), int)
        ),
        80,
    )
    frames = 2 * _first(config, "max_source_positions", 32)
    if name == "input_features":
        yield torch.randn(BATCH, 64, bins)
        yield torch.randn(BATCH, bins, frames)
        yield torch.randn(BATCH, bins, 64)
    yield torch.randn(BATCH, 2000)
    yield torch.randn(BATCH, 1, 2000)
    yield torch.randn(BATCH, 8000)
    yield torch.randn(BATCH, 64, bins)
    length = _first(config, "max_length", None)
    if isinstance(length, int) and length < 3000:
        yield torch.randn(BATCH, length, bins)
