"""Every known layout, in the order in which keys are looked up."""

from jaxmha.converters.layout import (
    by_hand,
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
from jaxmha.converters.layout.base import Layout, choose
from jaxmha.converters.layout.latent_forms import DEEPSEEK

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
# Layouts that keys never select: `deepseek` holds latent attention, not `MHAParams`, and only a
# config tells `starcoder-heads` from `starcoder`.
ALONE = {DEEPSEEK.name: DEEPSEEK, linear.STARCODER_HEADS.name: linear.STARCODER_HEADS}

# The layout of a destination in which every tensor is copied: it has no attention.
NONE = Layout("", (), {}, convention="")


def named(name: str) -> Layout:
    """The layout of this name, which may also be a list of layers that `by_hand.of_names` reads.

    An unknown name raises a ValueError that lists the known names.

    >>> named("linear:to_q,to_k,to_v,to_out").entries[0].key
    'to_q.weight'
    """
    return ALONE.get(name) or by_hand.of_names(name) or choose(LAYOUTS, [], name)
