"""Attention weights of every head of MiniLM on real sentences, by its migrated weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.encoders.run import SENTENCES, tokens_of
from experiments.recipes import bert
from jaxmha import Mask, multi_head_attention
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.introspect.head_statistics import HeadStatistics, head_statistics

# Sentences in which words come twice.
REPEATING = (
    "The bank by the river is not the bank that raised the rates.",
    "If the train is late, the next train will be late as well.",
    "To convert a checkpoint is to read a checkpoint and to write a checkpoint.",
)
SPECIAL = ("[CLS]", "[SEP]")
SHOWN = REPEATING[0]


class Attended(NamedTuple):
    """One sentence: its tokens (T), and weights `(L, N, T, T)` of L layers."""

    sentence: str
    tokens: list[str]
    weights: NDArray


def attended(path: Path, sentences: Sequence[str] = (*SENTENCES, *REPEATING)) -> list[Attended]:
    """Runs the encoder on a padded batch.

    Raises:
      ValueError: attention that returns its weights computes something else than without.
    """
    _, encoded = tokens_of(path, sentences)
    tokens = jnp.array([one.ids for one in encoded])
    lengths = np.array([sum(one.attention_mask) for one in encoded])
    model = bert.load(path.parent)
    mask = Mask.lengths(key_value=jnp.asarray(lengths))
    valid = np.arange(tokens.shape[1]) < lengths[:, None]
    states: Any = model.embeddings(tokens, jnp.zeros_like(tokens))
    layers = []
    for layer in model.blocks:
        params, semantics = layer.attention.to_params()
        out, weights = multi_head_attention(
            params, states, mask=mask, semantics=semantics, return_weights=True
        )
        without = layer.attention(states, mask=mask)
        if not np.allclose(np.asarray(out)[valid], np.asarray(without)[valid], atol=1e-5):
            raise ValueError("attention with weights differs from attention without")
        layers.append(np.asarray(weights))
        states = layer(states, mask)
    stacked = np.stack(layers, 1)  # B L N T S
    return [
        Attended(sentence, one.tokens[:n], row[..., :n, :n])
        for sentence, one, row, n in zip(sentences, encoded, stacked, lengths, strict=True)
    ]


def statistics(
    rows: Sequence[Attended], named: Sequence[str] = SPECIAL
) -> list[list[HeadStatistics]]:
    """Of every head of every layer, `[L][N]`: means over the sentences that have the statistic."""
    found = []
    for layer in range(rows[0].weights.shape[0]):
        of_sentences = [
            head_statistics(row.weights[layer], row.tokens, named=named) for row in rows
        ]
        found.append([mean(heads) for heads in zip(*of_sentences, strict=True)])
    return found


def mean(rows: Sequence[HeadStatistics]) -> HeadStatistics:
    """Of every field, without those that are None."""
    fields = []
    for values in zip(*rows, strict=True):
        known = [value for value in values if value is not None]
        fields.append(sum(known) / len(known) if known else None)
    return HeadStatistics(*fields)  # type: ignore[arg-type]


def uniform(rows: Sequence[Attended], named: Sequence[str] = SPECIAL) -> HeadStatistics:
    """The statistics of a head that attends to all keys equally."""
    alike = []
    for row in rows:
        T = len(row.tokens)
        alike += head_statistics(np.full((1, T, T), 1 / T), row.tokens, named=named)
    return mean(alike)
