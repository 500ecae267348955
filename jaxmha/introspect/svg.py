"""SVG that reads well on light and dark pages."""

import re

# Text and axes take the colour of the page; as a picture of its own, that of the reader's system.
STYLE = (
    "<style>:root{color:#1f2328}@media (prefers-color-scheme:dark){:root{color:#d1d7e0}}</style>"
)
INK = "#010203"  # drawn by nothing else


def adaptive(svg: str) -> str:
    """A drawing whose `INK` becomes the colour of the text around it.

    >>> adaptive('<svg width="1"><path fill="#010203"/></svg>').endswith(
    ...     '</style><path fill="currentColor"/></svg>'
    ... )
    True
    """
    svg = svg.replace(INK, "currentColor")
    return re.sub(r"(<svg [^>]*>)", lambda found: found[1] + STYLE, svg, count=1)
