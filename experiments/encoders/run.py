"""One migrated encoder and torch's: both in float32, against torch in float64."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.encoders import sceptr
from experiments.encoders.models import load
from experiments.recipes import bert
from jaxmha import checkpoint
from jaxmha.converters.layout.arrays import NDArray, to_numpy, to_torch
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.migrate.plans import Plan
from jaxmha.converters.verify import oracle, report

SENTENCES = (
    "Attention weighs every word of a sentence against every other.",
    "A transformer compares each token with all the others.",
    "The bank raised its interest rates again this spring.",
    "We walked along the bank of the river until dusk.",
    "Short.",
    "The ferry leaves at seven, stops twice along the coast, and returns unless the wind is strong.",
    "How do I convert a PyTorch checkpoint to Flax without losing a single bit?",
    "Der Zug nach Hamburg hat heute leider vierzig Minuten Verspätung.",
)
RESIDUES = 20


@dataclass
class Row:
    """One encoder.

    Attributes:
      tensors, parameters: of the file. verified: every tensor bit by bit, every block's forward.
      largest: largest difference of Flax from torch, over all outputs of real tokens, both float32.
      flax, torch: RMS error against torch in float64, in rounding floors of the output.
      cosine: least similarity of a vector of Flax with torch's.
    """

    model: str
    tensors: int
    parameters: int
    layers: int
    heads: int
    features: int
    verified: bool
    largest: float
    flax: float
    torch: float
    cosine: float


def migrated(source: Path, rename: Callable[[Plan], Plan] = lambda plan: plan) -> tuple[Any, bool]:
    """The tensors of a file in Flax's layout, by way of a file, and whether it was verified."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "flax.safetensors"
        plan = rename(pipeline.plan(source, to="flax")[0])
        pipeline.convert(source, target, plan=plan)
        same = report.check(source, target, plan).same
        with checkpoint.open(target) as file:
            return {name: file[name] for name in file}, same


def run_sceptr(folder: Path) -> Row:
    """One variant on a padded batch of random receptors."""
    import torch

    from experiments.encoders.torch_sceptr import Sceptr

    config = json.loads((folder / "config.json").read_text())
    with checkpoint.open(folder / "state_dict.pt") as file:
        state = {name: to_torch(file[name]) for name in file}
    theirs = Sceptr(config, state)
    tensors, verified = migrated(folder / "state_dict.pt", sceptr.renamed)
    ours = sceptr.Sceptr(config, tensors)
    if unused := load(ours, tensors):
        raise ValueError(f"no place for {unused}")
    loops = next(x for name, x in state.items() if "compartment" in name)
    tokens = receptors(np.random.default_rng(0), len(loops) - 1)
    out = [to_numpy(x) for x in theirs(torch.from_numpy(tokens))]
    exact = [to_numpy(x) for x in theirs.double()(torch.from_numpy(tokens))]
    flax = [np.asarray(x) for x in nnx.jit(lambda model, x: model(x))(ours, jnp.asarray(tokens))]
    valid = tokens[..., 0] != 0
    stack = config["model"]["self_attention_stack"]["initargs"]
    about = (stack["num_layers"], stack["nhead"], stack["d_model"])
    return _row(folder.name, tensors, about, verified, flax, out, exact, valid)


def receptors(rng: np.random.Generator, loops: int, batch: int = 7) -> NDArray:
    """Random receptors `(B, T, 4)` of different lengths, some loops missing or of one residue."""
    rows = []
    for i in range(batch):
        row = [(2, 0, 0, 0)]
        for loop in range(1, loops + 1):
            length = 1 if (i, loop) == (1, 1) else int(rng.integers(4, 21))
            if i and loop > 1 and rng.random() < 0.3:
                continue
            residues = rng.integers(sceptr.SPECIAL, sceptr.SPECIAL + RESIDUES, length)
            row += [(int(r), j, length, loop) for j, r in enumerate(residues, 1)]
        rows.append(row)
    T = max(map(len, rows))
    return np.array([row + [(0, 0, 0, 0)] * (T - len(row)) for row in rows])


def tokens_of(path: Path, sentences: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """The config.json next to a checkpoint, and sentences by its tokenizer, padded to the longest."""
    from tokenizers import Tokenizer

    config = json.loads((path.parent / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(path.parent / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding(pad_id=config["pad_token_id"])
    return config, tokenizer.encode_batch(list(sentences))


def run_minilm(path: Path) -> Row:
    """Sentence embeddings of real sentences, padded to the longest."""
    import torch
    import transformers

    config, encoded = tokens_of(path, SENTENCES)
    tokens = np.array([one.ids for one in encoded])
    mask = np.array([one.attention_mask for one in encoded])
    tensors, verified = migrated(path)
    ours = bert.load(path.parent)
    with checkpoint.open(path) as file:
        state = {name: to_torch(file[name]) for name in file if name != "embeddings.position_ids"}
    theirs = transformers.BertModel(transformers.BertConfig(**config))
    theirs.load_state_dict(state, strict=True)
    theirs.eval()

    def with_embeddings(states: NDArray, pooled: NDArray) -> list[NDArray]:
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        vectors = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
        return [states, pooled, vectors.astype(states.dtype)]

    def in_torch() -> list[NDArray]:
        with torch.no_grad():
            out = theirs(torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask))
        return with_embeddings(to_numpy(out.last_hidden_state), to_numpy(out.pooler_output))

    out = in_torch()
    theirs.double()
    exact = in_torch()
    states = nnx.jit(bert.BERT.__call__)(
        ours, jnp.asarray(tokens), lengths=jnp.asarray(mask.sum(1))
    )
    kernel, bias = (tensors[f"pooler/dense/{name}"] for name in ("kernel", "bias"))
    flax = with_embeddings(np.asarray(states), np.asarray(jnp.tanh(states[:, 0] @ kernel + bias)))
    about = (config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"])
    return _row("MiniLM", tensors, about, verified, flax, out, exact, mask == 1)


def _row(
    name: str,
    tensors: dict[str, NDArray],
    about: tuple[int, int, int],
    verified: bool,
    flax: list[NDArray],
    out: list[NDArray],
    exact: list[NDArray],
    valid: NDArray,
) -> Row:
    """All outputs of real tokens, compared."""
    flax, out, exact = ([x[0][valid], *x[1:]] for x in (flax, out, exact))
    errors = [
        max(
            float(np.sqrt(np.mean(np.square(a.astype(np.float64) - b))))
            / oracle.rounding_floor(b, np.dtype(np.float32))
            for a, b in zip(side, exact, strict=True)
        )
        for side in (flax, out)
    ]
    largest = max(float(np.abs(a - b).max()) for a, b in zip(flax, out, strict=True))
    a, b = flax[-1].astype(np.float64), out[-1].astype(np.float64)
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    parameters = sum(x.size for x in tensors.values() if x.dtype.kind == "f")
    least = float(cosine.min())
    flax_error, torch_error = errors
    return Row(
        *(name, len(tensors), parameters), *about, verified, largest, flax_error, torch_error, least
    )
