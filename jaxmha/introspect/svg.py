"""SVG that is legible on light and dark pages."""

import re

# Text and axes take the colour of the page; a standalone image follows the system's colour scheme.
STYLE = (
    "<style>:root{color:#1f2328}@media (prefers-color-scheme:dark){:root{color:#d1d7e0}}</style>"
)
INK = "#010203"  # `adaptive` replaces this colour, which drawings use for nothing else


def adaptive(svg: str) -> str:
    """Replaces `INK` in a drawing by the colour of the surrounding text.

    >>> adaptive('<svg width="1"><path fill="#010203"/></svg>').endswith(
    ...     '</style><path fill="currentColor"/></svg>'
    ... )
    True
    """
    svg = svg.replace(INK, "currentColor")
    return re.sub(r"(<svg [^>]*>)", lambda found: found[1] + STYLE, svg, count=1)
