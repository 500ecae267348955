"""Every known layout, in the order in which keys are looked up."""

from jaxmha.converters.layout import (
    equinox,
    flax,
    haiku,
    huggingface,
    jaxmha,
    keras,
    linear,
    meaning,
    torch,
)
from jaxmha.converters.layout.base import Layout

LAYOUTS: tuple[Layout, ...] = (
    *torch.LAYOUTS,
    *keras.LAYOUTS,
    *flax.LAYOUTS,
    *huggingface.LAYOUTS,
    *linear.LAYOUTS,
    *meaning.LAYOUTS,
    *equinox.LAYOUTS,
    *haiku.LAYOUTS,
    *jaxmha.LAYOUTS,
)
