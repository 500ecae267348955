"""Markdown with figures next to it as HTML that stands alone."""

import base64
import re
from pathlib import Path

import markdown
from markdown.extensions.toc import TocExtension, slugify

FIGURE = re.compile(r'<p><img alt="([^"]*)" src="([^"]+)" /></p>')
LINK = re.compile(r'<a href="(?!https?:)([^"]*)">(.*?)</a>')


def inline(text: str) -> str:
    """A sentence: no paragraph around it."""
    made: str = markdown.markdown(text)
    return made.removeprefix("<p>").removesuffix("</p>")


def body(text: str, folder: Path, name: str, anchors: set[str]) -> str:
    """Headings one level lower, figures and tables in boxes of their own.

    Args:
        text: Markdown, headings from ## on.
        folder: that paths of figures start from.
        name: unique on the page; what ids start with.
        anchors: of the page. Links to folders of these names lead to them; other links to files
            become plain text.
    """

    def figure(match: re.Match[str]) -> str:
        caption, path = match.groups()
        data = base64.b64encode((folder / path).read_bytes()).decode()
        kind = "svg+xml" if path.endswith(".svg") else path.rpartition(".")[2]
        image = f'<img class="{kind[:3]}" alt="{caption}" src="data:image/{kind};base64,{data}">'
        return f"<figure><div>{image}</div><figcaption>{caption}</figcaption></figure>"

    def link(match: re.Match[str]) -> str:
        target = Path(match[1]).name
        return f'<a href="#{target}">{match[2]}</a>' if target in anchors else match[2]

    toc = TocExtension(baselevel=2, slugify=lambda title, dash: f"{name}-{slugify(title, dash)}")
    made = markdown.markdown(text, extensions=["tables", "fenced_code", toc])
    made = FIGURE.sub(figure, LINK.sub(link, made))
    made = made.replace("<table>", '<div class="table"><table>')
    return made.replace("</table>", "</table></div>")
