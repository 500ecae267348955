"""Weights and masks in and out of other frameworks: one module per framework, the same verbs.

`import_params`, `export_params`: flat dicts of arrays. `from_module`, `to_module`: live layers.
Importing a module of this package loads no framework; its functions that take or make live
objects do.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxmha.converters.layout import Layout


def layouts() -> "dict[str, Layout]":
    """Every known layout by name: its entries, and what it cannot hold.

    >>> layouts()["torch"].entries[0].axes
    '(qkv N H) Dq'
    """
    from jaxmha.converters.blocks import LAYOUTS

    return {layout.name: layout for layout in LAYOUTS}
