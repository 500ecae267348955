"""Attention weights of a live model for a text, with the text's tokens as labels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from unittest import mock

import numpy as np

from jaxmha.converters.layout.arrays import NDArray, packages_of, to_numpy
from jaxmha.extras import needed

Item = TypeVar("Item")
_SHOWN = 8  # most files in a message
_LONGEST = 300  # most characters of a message of transformers


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that this module calls."""

    def __call__(self, text: str) -> Mapping[str, list[int]]: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...


class TextWeights(NamedTuple):
    """The weights of one layer for a text.

    Attributes:
      weights: `(N, T, T)`.
      tokens: T labels.
    """

    weights: NDArray
    tokens: list[str]


def text_weights(model: object, tokenizer: Tokenizer, text: str, layer: int = 0) -> TextWeights:
    """Runs a model on a text, and returns the weights of one of its attention layers.

    Args:
      model: a model of transformers (of an encoder with a decoder, its encoder runs), or an nnx
        model that is called with ids `(1, T)` and has layers that can sow weights: those of Flax,
        and of `jaxmha.flax.nnx`.
      tokenizer: a tokenizer of transformers.
      layer: number of the attention layer, in the order of their calls; -1 is the last.

    Raises:
      TypeError: the model is of another kind.
      ValueError: the text has no tokens, or the model calls no such layer.
    """
    ids = np.asarray([tokenizer(text)["input_ids"]])
    if ids.size == 0:
        raise ValueError(f"the tokenizer makes no token of the text {text!r}")
    tokens = tokenizer.convert_ids_to_tokens(ids[0].tolist())
    kinds = packages_of(model)
    if "transformers" in kinds:
        return TextWeights(_transformers(model, ids, layer), tokens)
    if "flax" in kinds:
        return TextWeights(_nnx(model, ids, layer), tokens)
    raise TypeError(f"expected a model of transformers or nnx, got {type(model).__name__}")


def folder_model(folder: str) -> object:
    """The model of a folder that `save_pretrained` wrote, from its safetensors alone.

    Raises ValueError if transformers does not load a model from it.
    """
    with needed("transformers"):
        import transformers
    with _loading("model", folder, "config.json, model.safetensors", "name the folder of a model"):
        made: object = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True
        )
    return made


def folder_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer that `save_pretrained` wrote into a folder.

    Raises ValueError if transformers does not load a tokenizer from it.
    """
    with needed("transformers"):
        import transformers
    files, remedy = "tokenizer.json, tokenizer_config.json", "give its folder by --tokenizer FOLDER"
    with _loading("tokenizer", folder, files, remedy):
        made: Tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return made


@contextmanager
def _loading(what: str, folder: str, files: str, remedy: str) -> Iterator[None]:
    """Turns an error of transformers into a ValueError that says what the folder lacks."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        held = "there is no such folder"
        if Path(folder).is_dir():
            names = sorted(path.name for path in Path(folder).iterdir())
            held = f"it has {', '.join(names[:_SHOWN]) or 'no file'}"
        reason = " ".join(str(error).split())[:_LONGEST]
        raise ValueError(
            f"{folder}: transformers loads no {what} from it: expected files of save_pretrained such "
            f"as {files}, and {held}; {remedy} ({reason})"
        ) from error


def _transformers(given: object, ids: NDArray, layer: int) -> NDArray:
    import torch

    model: Any = given
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    model.eval()
    model.set_attn_implementation("eager")  # others return no weights
    with torch.no_grad():
        found = model(torch.as_tensor(ids), output_attentions=True).attentions or ()
    return to_numpy(_one([x for x in found if x is not None], layer)[0])


def _nnx(given: object, ids: NDArray, layer: int) -> NDArray:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    model: Any = given
    model.eval()
    calls: list[tuple[object, tuple[object, ...], dict[str, object]]] = []

    def recording(original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def call(self: object, *args: object, **keywords: object) -> object:
            calls.append((self, args, keywords))
            return original(self, *args, **keywords)

        return call

    kinds = {type(one) for _, one in nnx.iter_modules(model)}
    with ExitStack() as stack:
        for kind in kinds:
            if "sow_weights" in signature(kind.__call__).parameters:
                patch = mock.patch.object(kind, "__call__", recording(kind.__call__))
                stack.enter_context(patch)
        model(jnp.asarray(ids))
    chosen, args, keywords = _one(calls, layer)

    def sowing(one: Callable[..., object]) -> object:
        return one(*args, **keywords | {"sow_weights": True})

    _, sown = nnx.capture(sowing, nnx.Intermediate)(chosen)
    (weights,) = jax.tree.leaves(sown)
    return to_numpy(weights[0])


def _one(layers: Sequence[Item], number: int) -> Item:
    if not -len(layers) <= number < len(layers):
        raise ValueError(
            f"there is no layer {number}: the model called {len(layers)} layers that show weights. "
            "Stored weights of another layer can be plotted from an .npz file"
        )
    return layers[number]
