"""The same variants in torch, around stock `nn.TransformerEncoder`: what Flax is compared with.

Published state dicts load strictly, part by part.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from experiments.encoders.sceptr import SPECIAL


class Sceptr(nn.Module):
    """One variant, by its config.json; every tensor of its state dict is loaded."""

    def __init__(self, config: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        stack = config["model"]["self_attention_stack"]["initargs"]
        self.D, left = stack["d_model"], dict(state)

        def load(module: nn.Module | None, start: str) -> Any:
            names = [name for name in left if name.startswith(start)]
            tensors = {name.removeprefix(start): left.pop(name) for name in names}
            if module is None:
                return tensors
            module.load_state_dict(tensors, strict=True)
            return module

        for name, table in load(None, "_token_embedder.").items():
            self.register_buffer(name.lstrip("_").replace(".", "/"), table)
        self.blosum = any(name.startswith("blosum") for name, _ in self.named_buffers())
        outer, self.projector = "_self_attention_stack.", None
        start = f"{outer}_initial_projector."
        if f"{start}weight" in state:
            self.projector = load(nn.Linear(stack["embedding_dim"], self.D, bias=False), start)
            outer += "_standard_stack."
        layer = nn.TransformerEncoderLayer(self.D, stack["nhead"], 4 * self.D, batch_first=True)
        encoder = nn.TransformerEncoder(layer, stack["num_layers"])
        self.encoder = load(encoder, f"{outer}_self_attention_stack.")
        self.predictor = load(nn.Linear(self.D, 20), "_mlm_token_prediction_projector.projector.")
        if left:
            raise ValueError(f"no place for {list(left)}")
        self.averages = "Average" in config["model"]["vector_representation_delegate"]["class"]
        self.eval()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(B, T, 4)` to `(B, T, D)`."""
        residue, position, length, loop = tokens.unbind(-1)

        def found(start: str, index: torch.Tensor) -> torch.Tensor:
            named = self.named_buffers(recurse=False)
            return next(table for name, table in named if name.startswith(start))[index]

        loops = found("compartment_embedding", loop)
        if self.projector is None:
            residues = found("token_embedding", residue) + found("position_embedding", position)
            summed: torch.Tensor = (residues + loops) * self.D**0.5
            return summed
        if self.blosum:
            special = found("blosum_embedding/_special", residue * (residue < SPECIAL))
            residues = special + found("blosum_embedding/_blosum", residue)
        else:
            residues = found("token_embedding", residue)
        along = (position - 1) / (length - 1)
        along[along.isnan()] = 0.5
        along[position == 0] = 0
        parts = [residues, along[..., None].to(residues.dtype), loops]
        projected: torch.Tensor = self.projector(torch.cat(parts, -1))
        return projected

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Residue predictions `(B, T, 20)`, and the representation of the receptor `(B, D)`."""
        padding = tokens[..., 0] == 0
        x = self.embed(tokens)
        states = self.encoder(src=x, src_key_padding_mask=padding)
        vector = states[:, 0]
        if self.averages:
            before = x
            for layer in self.encoder.layers[:-1]:
                before = layer(before, src_key_padding_mask=padding)
            counted = ~padding[..., None]
            counted[:, 0] = False
            vector = (before * counted).sum(1) / counted.sum(1)
        return self.predictor(states), nn.functional.normalize(vector, dim=1)
