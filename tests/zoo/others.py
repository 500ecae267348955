"""Models of other libraries than transformers: how each is built, and its inputs.

A model is built where its library is installed. `LIBRARIES` has a function for each library, from
the row of a model to the model and the arguments of its call.
"""

import importlib.util
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple


class Other(NamedTuple):
    """A model: its library, the name by which that builds it, and settings that make it small."""

    library: str
    name: str
    settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def title(self) -> str:
        """The name in results: `timm/vit_tiny_patch16_224`."""
        return f"{self.library}/{self.name}"


Made = tuple[Any, tuple[Any, ...], dict[str, Any]]


def rand(*shape: int) -> Any:
    import torch

    return torch.randn(shape)


def time_step() -> Any:
    import torch

    return torch.tensor([3])


def ids(*shape: int, most: int = 90) -> Any:
    import torch

    return torch.randint(3, most, shape)


def _timm(one: Other) -> Made:
    timm: Any = import_module("timm")

    settings = dict(one.settings)
    size = settings.pop("size", 0)
    model = timm.create_model(one.name, num_classes=5, **settings)
    channels, *sides = model.pretrained_cfg.get("input_size", (3, 224, 224))
    sides = [size, size] if size else sides
    return model, (rand(1, channels, *sides),), {}


def _torchvision(one: Other) -> Made:
    models: Any = import_module("torchvision.models")

    settings = dict(one.settings)
    shape = settings.pop("shape", (3, 224, 224))
    homes = (models, models.video, models.video.swin_transformer)
    home = next(home for home in homes if hasattr(home, one.name))
    return getattr(home, one.name)(**settings), (rand(1, *shape),), {}


def _held(layer: Any) -> Any:
    """A module that only calls a layer."""
    from torch import nn

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = layer

        def forward(self, *args: Any) -> Any:
            return self.attn(*args)

    return Held()


def _torch(one: Other) -> Made:
    from torch import nn

    settings = {"d_model": 24, "nhead": 3, "dim_feedforward": 40, "batch_first": True} | dict(
        one.settings
    )
    kind = one.name.partition(" ")[0]
    if kind == "MultiheadAttention":
        whole = {"embed_dim": 24, "num_heads": 3, "batch_first": True} | dict(one.settings)
        inputs = [rand(2, n, whole.get(k, 24)) for n, k in ((7, ""), (9, "kdim"), (9, "vdim"))]
        return _held(nn.MultiheadAttention(**whole)), tuple(inputs), {}
    if kind == "Transformer":
        model = nn.Transformer(num_encoder_layers=2, num_decoder_layers=2, **settings)
        mask = model.generate_square_subsequent_mask(7)
        return model, (rand(2, 9, 24), rand(2, 7, 24)), {"tgt_mask": mask}
    if kind == "TransformerEncoder":
        layer = nn.TransformerEncoderLayer(**settings)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (rand(2, 9, 24),), {}
    return nn.TransformerDecoderLayer(**settings), (rand(2, 7, 24), rand(2, 9, 24)), {}


def _open_clip(one: Other) -> Made:
    open_clip: Any = import_module("open_clip")

    sight = {"image_size": 64, "layers": 2, "width": 96, "head_width": 32, "patch_size": 16}
    text = {"context_length": 12, "vocab_size": 100, "width": 48, "heads": 3, "layers": 2}
    more = dict(one.settings)
    sight |= more.pop("vision_cfg", {})
    text |= more.pop("text_cfg", {})
    model = getattr(open_clip, one.name.partition(" ")[0])(
        embed_dim=48, vision_cfg=sight, text_cfg=text, **more
    )
    return model, (rand(2, 3, 64, 64), ids(2, 12)), {}


def _x_transformers(one: Other) -> Made:
    x: Any = import_module("x_transformers")

    settings = {"dim": 48, "depth": 2, "heads": 3, "attn_dim_head": 16} | dict(one.settings)
    kind = one.name.partition(" ")[0]
    if kind == "ViTransformerWrapper":
        model = x.ViTransformerWrapper(
            image_size=64, patch_size=16, attn_layers=x.Encoder(**settings)
        )
        return model, (rand(2, 3, 64, 64),), {}
    layers = getattr(x, kind)(**settings)
    model = x.TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers)
    more = {"context": rand(2, 9, 48)} if settings.get("cross_attend") else {}
    return model, (ids(2, 12),), more


def _diffusers(one: Other) -> Made:
    diffusers: Any = import_module("diffusers")

    settings = dict(one.settings)
    args, kwargs = settings.pop("inputs")()
    return getattr(diffusers, one.name.partition(" ")[0])(**settings), args, kwargs


def _vit_pytorch(one: Other) -> Made:
    module, _, kind = one.name.rpartition(".")
    home: Any = import_module(f"vit_pytorch.{module}" if module else "vit_pytorch")
    settings = dict(one.settings)
    shape = settings.pop("shape", (3, 64, 64))
    return getattr(home, kind)(**settings), (rand(1, *shape),), {}


def _esm(one: Other) -> Made:
    esm: Any = import_module("esm")

    if one.name == "ESM2":
        return esm.ESM2(num_layers=2, embed_dim=48, attention_heads=3), (ids(2, 12, most=30),), {}
    from argparse import Namespace

    kind = "msa_transformer" if one.name == "MSATransformer" else "ESM-1b"
    alphabet = esm.Alphabet.from_architecture(kind)
    args = Namespace(arch="roberta_large", layers=2, embed_dim=48, ffn_embed_dim=64, attention_heads=3,
                     max_positions=32, max_tokens=64, dropout=0.0, attention_dropout=0.0,
                     activation_dropout=0.0, max_tokens_per_msa=2**14, embed_positions_msa=True,
                     embed_positions_msa_dim=48, emb_layer_norm_before=True, token_dropout=False)  # fmt: skip
    model = getattr(esm, one.name)(args, alphabet)
    return model, (ids(1, 3, 12, most=25) if "MSA" in one.name else ids(2, 12, most=25),), {}


def _segment_anything(one: Other) -> Made:
    import torch

    sam: Any = import_module("segment_anything.modeling")

    if one.name == "ImageEncoderViT":
        model: Any = sam.ImageEncoderViT(img_size=96, patch_size=16, embed_dim=48, depth=2, num_heads=3,
                                     out_chans=16, use_rel_pos=True, window_size=4,
                                     global_attn_indexes=(1,))  # fmt: skip
        return model, (rand(1, 3, 96, 96),), {}
    inner = sam.TwoWayTransformer(depth=2, embedding_dim=48, mlp_dim=64, num_heads=3)
    model = sam.MaskDecoder(transformer_dim=48, transformer=inner)
    places = torch.randn(1, 48, 6, 6)
    return model, (), {"image_embeddings": rand(1, 48, 6, 6), "image_pe": places,
                       "sparse_prompt_embeddings": rand(1, 2, 48),
                       "dense_prompt_embeddings": rand(1, 48, 6, 6), "multimask_output": True}  # fmt: skip


def _whisper(one: Other) -> Made:
    whisper: Any = import_module("whisper.model")

    sizes = whisper.ModelDimensions(n_mels=20, n_audio_ctx=16, n_audio_state=48, n_audio_head=3,
                            n_audio_layer=2, n_vocab=100, n_text_ctx=16, n_text_state=48,
                            n_text_head=3, n_text_layer=2)  # fmt: skip
    return whisper.Whisper(sizes), (rand(1, 20, 32), ids(1, 9)), {}


def _litgpt(one: Other) -> Made:
    litgpt: Any = import_module("litgpt")

    settings = {"n_layer": 2, "padded_vocab_size": 100, "vocab_size": 100, "block_size": 32} | dict(
        one.settings
    )
    return litgpt.GPT(litgpt.Config.from_name(one.name, **settings)), (ids(2, 12),), {}


def by_path(one: Other) -> Made:
    """A model whose name is the path of its class; its settings have `inputs`.

    A setting that is a function is called: it returns what its library makes.
    """
    path, _, kind = one.name.partition(" ")[0].rpartition(".")
    home: Any = import_module(f"{one.library}.{path}" if path else one.library)
    settings = dict(one.settings)
    args, kwargs = settings.pop("inputs")()
    made = {name: value() if callable(value) else value for name, value in settings.items()}
    return getattr(home, kind)(**made), args, kwargs


LIBRARIES: dict[str, Callable[[Other], Made]] = {
    "timm": _timm, "torchvision": _torchvision, "torch": _torch, "open_clip": _open_clip,
    "x_transformers": _x_transformers, "diffusers": _diffusers, "vit_pytorch": _vit_pytorch,
    "esm": _esm, "segment_anything": _segment_anything, "whisper": _whisper, "litgpt": _litgpt,
}  # fmt: skip


def installed(library: str) -> bool:
    """True if a library can be imported."""
    return importlib.util.find_spec(library) is not None


def build(one: Other) -> Made:
    """A model with its arguments."""
    return LIBRARIES.get(one.library, by_path)(one)
