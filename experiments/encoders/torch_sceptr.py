"""The same variants in torch, around stock `nn.TransformerEncoder`: what Flax is compared with.

Module names are those of the published state dicts, which load strictly.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from experiments.encoders.sceptr import SPECIAL


class Table(nn.Module):
    """A buffer under the name that the state dict has."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.name = name
        self.register_buffer(name, torch.zeros(shape))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(self, self.name)[index]
        return found


class Sceptr(nn.Module):
    """One variant, by its config.json and the shapes of its state dict."""

    def __init__(self, config: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        stack = config["model"]["self_attention_stack"]["initargs"]
        D, embedder = stack["d_model"], "_token_embedder."
        self.D = D
        self.averages = "Average" in config["model"]["vector_representation_delegate"]["class"]
        tables = {
            k.removeprefix(embedder): tuple(v.shape) for k, v in state.items() if embedder in k
        }
        self._token_embedder = nn.Module()
        for name, shape in tables.items():
            *path, last = name.split(".")
            place: nn.Module = self._token_embedder
            for part in path[:-1]:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            made = nn.Embedding(shape[0], shape[1]) if last == "weight" else Table(last, shape)
            if hasattr(place, path[-1]):  # one that has a table and another module
                getattr(place, path[-1]).register_buffer(last, torch.zeros(shape))
            else:
                place.add_module(path[-1], made)
        layer = nn.TransformerEncoderLayer(D, stack["nhead"], 4 * D, batch_first=True)
        encoder = nn.TransformerEncoder(layer, stack["num_layers"])
        inner = nn.Module()
        inner.add_module("_self_attention_stack", encoder)
        self._self_attention_stack = inner
        self.projects = "_self_attention_stack._initial_projector.weight" in state
        if self.projects:
            self._self_attention_stack = nn.Module()
            projector = nn.Linear(stack["embedding_dim"], D, bias=False)
            self._self_attention_stack.add_module("_initial_projector", projector)
            self._self_attention_stack.add_module("_standard_stack", inner)
        self._mlm_token_prediction_projector = nn.Module()
        self._mlm_token_prediction_projector.add_module("projector", nn.Linear(D, 20))
        self.load_state_dict(dict(state), strict=True)
        self.eval()

    @property
    def encoder(self) -> Any:
        """The stock encoder."""
        stack: Any = self._self_attention_stack
        return (stack._standard_stack if self.projects else stack)._self_attention_stack

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(B, T, 4)` to `(B, T, D)`."""
        e: Any = self._token_embedder
        residue, position, length, loop = tokens.unbind(-1)
        if not self.projects:
            found = e.token_embedding(residue) + e.position_embedding(position)
            summed: torch.Tensor = (found + e.compartment_embedding(loop)) * self.D**0.5
            return summed
        if hasattr(e, "_blosum_embedding"):
            blosum = e._blosum_embedding
            found = blosum._special_token_embeddings(residue * (residue < SPECIAL))
            found = found + blosum._blosum_embeddings[residue]
        else:
            found = e._token_embedding(residue)
        along = (position - 1) / (length - 1)
        along[along.isnan()] = 0.5
        along[position == 0] = 0
        parts = [found, along[..., None].to(found.dtype), e._compartment_embedding(loop)]
        projector: Any = self._self_attention_stack._initial_projector
        projected: torch.Tensor = projector(torch.cat(parts, -1))
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
        head: Any = self._mlm_token_prediction_projector.projector
        return head(states), nn.functional.normalize(vector, dim=1)
