"""The 16 variants of SCEPTR in Flax, and the names that their tensors get in a plan.

Nagano et al., Contrastive learning of T cell receptor representations, Cell Systems 2025. Tokens
are `(B, T, 4)`: residue, position in its loop from 1, length of the loop, loop; 0 is padding.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from experiments.encoders.models import Array, Encoder
from jaxmha import Mask
from jaxmha.converters.migrate.plans import Plan

SPECIAL = 3  # residues below are padding, mask and class tokens

# Start of a name in a migrated file -> start of the attribute's path here.
NAMES = {
    "_self_attention_stack/_standard_stack/_self_attention_stack/": "encoder/",
    "_self_attention_stack/_self_attention_stack/": "encoder/",
    "_self_attention_stack/_initial_projector": "projector",
    "_mlm_token_prediction_projector/projector": "predictor",
    "_token_embedder/_blosum_embedding/_special_token_embeddings": "embedder/special",
    "_token_embedder._blosum_embedding._blosum_embeddings": "embedder/residues",
    "_token_embedder._token_embedding._token_embeddings": "embedder/residues",
    "_token_embedder._compartment_embedding._token_embeddings": "embedder/loops",
    "_token_embedder/token_embedding": "embedder/residues",
    "_token_embedder/compartment_embedding": "embedder/loops",
    "_token_embedder.position_embedding.position_embedding_matrix": "embedder/positions",
}


def renamed(plan: Plan) -> Plan:
    """The plan with the paths of `Sceptr`."""
    steps = []
    for step in plan.steps:
        old = next(start for start in NAMES if step.target.startswith(start))
        steps.append(replace(step, target=NAMES[old] + step.target.removeprefix(old)))
    return replace(plan, steps=tuple(steps))


class OneHot(nnx.Module):  # type: ignore[misc]
    """Fixed tables of residues and loops, and how far along its loop a residue is."""

    def __init__(self, residues: tuple[int, int], loops: tuple[int, int], blosum: bool) -> None:
        self.residues = nnx.BatchStat(jnp.zeros(residues))  # a buffer, not a parameter
        self.loops = nnx.BatchStat(jnp.zeros(loops))
        self.special = nnx.Embed(SPECIAL, residues[1], rngs=nnx.Rngs(0)) if blosum else None

    def __call__(self, tokens: Array) -> Array:
        residue, position, length, loop = (tokens[..., i] for i in range(4))
        found = self.residues[residue]
        if self.special is not None:
            found = found + self.special(residue * (residue < SPECIAL))
        along = (position - 1) / jnp.maximum(length - 1, 1)
        along = jnp.where(length == 1, 0.5, along) * (position > 0)
        return jnp.concatenate([found, along[..., None].astype(found.dtype), self.loops[loop]], -1)


class Summed(nnx.Module):  # type: ignore[misc]
    """Learned embeddings of residue and loop, and a fixed one of the position, added."""

    def __init__(self, residues: int, positions: int, loops: int, D: int) -> None:
        self.residues = nnx.Embed(residues, D, rngs=nnx.Rngs(0))
        self.positions = nnx.BatchStat(jnp.zeros((positions, D)))
        self.loops = nnx.Embed(loops, D, rngs=nnx.Rngs(0))

    def __call__(self, tokens: Array) -> Array:
        D = self.residues.features
        found = self.residues(tokens[..., 0]) + self.positions[tokens[..., 1]]
        summed: Array = found + self.loops(tokens[..., 3])
        return summed * jnp.sqrt(jnp.asarray(D, found.dtype))


class Sceptr(nnx.Module):  # type: ignore[misc]
    """One variant, by its config.json; table sizes are read from the migrated tensors."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        stack = config["model"]["self_attention_stack"]["initargs"]
        D = stack["d_model"]
        shapes = {name: array.shape for name, array in tensors.items()}
        self.averages = "Average" in config["model"]["vector_representation_delegate"]["class"]
        self.projector: Any = nnx.data(None)
        if "embedder/positions" in shapes:
            residues, loops = (shapes[f"embedder/{x}/embedding"] for x in ("residues", "loops"))
            positions = shapes["embedder/positions"][0]
            self.embedder: Any = Summed(residues[0], positions, loops[0], D)
        else:
            residues, loops = shapes["embedder/residues"], shapes["embedder/loops"]
            blosum = "embedder/special/embedding" in shapes
            self.embedder = OneHot(residues, loops, blosum)
            width = stack["embedding_dim"]
            self.projector = nnx.Linear(width, D, use_bias=False, rngs=nnx.Rngs(0))
        self.encoder = Encoder(D, stack["nhead"], stack["num_layers"])
        self.predictor = nnx.Linear(D, 20, rngs=nnx.Rngs(0))

    def embed(self, tokens: Array) -> Array:
        """`(B, T, 4)` to `(B, T, D)`."""
        x = self.embedder(tokens)
        projected: Array = x if self.projector is None else self.projector(x)
        return projected

    def __call__(self, tokens: Array) -> tuple[Array, Array]:
        """Residue predictions `(B, T, 20)`, and the representation of the receptor `(B, D)`."""
        valid = tokens[..., 0] != 0
        mask = Mask.padding(key_value=valid)
        x = self.embed(tokens)
        states = self.encoder(x, mask)
        vector = states[:, 0]
        if self.averages:  # of the layer before the last, without the class token
            counted = (valid & (jnp.arange(tokens.shape[1]) > 0)[None])[..., None]
            vector = (self.encoder(x, mask, -1) * counted).sum(1) / counted.sum(1)
        vector = vector / jnp.linalg.norm(vector, axis=-1, keepdims=True)
        return self.predictor(states), vector
