"""Markdown with figures next to it as HTML that stands alone."""

import base64
import html
import itertools
import re
from collections import Counter
from pathlib import Path

import markdown

FIGURE = re.compile(r'<p><img alt="([^"]*)" src="([^"]+)" /></p>')
HEADING = re.compile(r"<h([2-5])>(.*?)</h\1>")
LINK = re.compile(r'<a href="(?!https?:)([^"]*)">(.*?)</a>')
# Parts that only a standalone SVG needs: the page has its own colours, and a caption per figure.
ALONE = re.compile(r"<style.*?</style>|<metadata>.*?</metadata>|<title>.*?</title>", re.DOTALL)


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

    number = itertools.count(1)

    def figure(match: re.Match[str]) -> str:
        caption, path = match.groups()
        content = picture(folder / path, caption, f"{name}-figure{next(number)}")
        return f"<figure><div>{content}</div><figcaption>{caption}</figcaption></figure>"

    def heading(match: re.Match[str]) -> str:
        level, title = int(match[1]) + 1, match[2]
        slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"<.*?>|&\w+;", "", title).lower()).strip("-")
        return f'<h{level} id="{name}-{slug}">{title}</h{level}>'

    def link(match: re.Match[str]) -> str:
        target = Path(match[1]).name
        return f'<a href="#{target}">{match[2]}</a>' if target in anchors else match[2]

    made = markdown.markdown(text, extensions=["tables", "fenced_code"])
    made = FIGURE.sub(figure, HEADING.sub(heading, LINK.sub(link, made)))
    made = made.replace("<table>", '<div class="table"><table>')
    return made.replace("</table>", "</table></div>")


def picture(path: Path, about: str, name: str) -> str:
    """An SVG as part of the page, anything else as data."""
    if path.suffix == ".svg":
        return svg(path.read_text(), about, name)
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{about}" src="data:image/{path.suffix[1:]};base64,{data}">'


def svg(text: str, about: str, name: str) -> str:
    """As an element of a page: it takes the page's colours, and no other figure has its ids.

    >>> svg('<?xml?><svg width="72pt" height="9pt"><g id="a" clip-path="url(#b)"/></svg>', "A", "f")
    '<svg role="img" aria-label="A" style="width:96px"><g id="f-a" clip-path="url(#f-b)"/></svg>'
    """
    text = ALONE.sub("", text[text.index("<svg") :]).strip()
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    times: Counter[str] = Counter()

    def once(match: re.Match[str]) -> str:
        times[match[1]] += 1
        return f'id="{match[1]}-{times[match[1]]}"' if times[match[1]] > 1 else match[0]

    text = re.sub(r'\bid="([^"]*)"', once, text)  # equal images are written twice with one id
    start, rest = text.split(">", 1)
    width = re.search(r' width="([\d.]+)pt"', start)
    start = re.sub(r' (width|height)="[^"]*"', "", start)
    pixels = float(width[1]) * 4 / 3 if width else 640
    label = html.escape(html.unescape(about))
    start = start.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return f'{start} style="width:{pixels:.0f}px">{rest}'
