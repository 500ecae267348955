"""Finds layouts that hold parameters which another layout refuses, for its error message."""

from jaxmha import MHAParams, Semantics
from jaxmha.converters.layout import keras, registry
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.layout.validation import refuse_export

# The layouts that hold the most kinds of attention, and do not belong to a single architecture.
_GENERAL = ("flax", "keras-gqa", "jaxmha")


def remedy(target: Layout, params: MHAParams, semantics: Semantics) -> str:
    """Says which general layouts hold parameters that `target` refuses; "" if none does.

    For a layout of .weights.h5 files it names others of such files, or else jaxmha.

    >>> import numpy as np
    >>> from jaxmha import Projection
    >>> query, key = (Projection(np.zeros((6, heads, 3))) for heads in (2, 1))
    >>> params = MHAParams(query, key, key, Projection(np.zeros((2, 3, 6))))
    >>> print(remedy(registry.named("keras"), params, Semantics()))
    ; --to flax, keras-gqa or jaxmha holds it
    """
    in_file = {name: layout for name, (layout, _) in keras.IN_FILE.items()}
    if is_file := target in in_file.values():
        known = in_file
    else:
        known = {name: registry.named(name) for name in _GENERAL}
    names = [
        name for name, one in known.items() if one != target and _holds(one, params, semantics)
    ]
    if names:
        listed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        own = semantics != Semantics() and names[-1] == "jaxmha"
        return f"; --to {listed}{' (as .safetensors)' * own} holds it"
    if is_file and _holds(registry.named("jaxmha"), params, semantics):
        return "; --to jaxmha holds it, in a .safetensors file"
    return ""


def _holds(layout: Layout, params: MHAParams, semantics: Semantics) -> bool:
    try:
        refuse_export(layout, params, semantics)
    except ValueError:
        return False
    return True
