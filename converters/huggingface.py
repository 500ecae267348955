"""Imports and exports attention blocks of Hugging Face transformers and timm checkpoints.

Layouts with norms, sinks or gates, whose tensors do not determine the function of the layer, are
used only if the caller names them: `layout="llama-sinks"` for gpt-oss.

The checkpoint's config.json holds the head count (`num_attention_heads`, `n_head`, `num_heads`).
"""

from jaxmha.converters.discovery.latent import LatentBehaviour, latent_behaviour
from jaxmha.converters.layout import meaning
from jaxmha.converters.layout.api import make_api
from jaxmha.converters.layout.huggingface import BERT, GPT2, LAYOUTS, NEOX, T5, TIMM, VIT, WHISPER
from jaxmha.converters.layout.latent import export_latent_params, import_latent_params

__all__ = [
    "BERT",
    "GPT2",
    "LAYOUTS",
    "NEOX",
    "T5",
    "TIMM",
    "VIT",
    "WHISPER",
    "LatentBehaviour",
    "export_latent_params",
    "export_params",
    "import_latent_params",
    "import_params",
    "latent_behaviour",
]

import_params, export_params = make_api(LAYOUTS, meaning.LAYOUTS)
