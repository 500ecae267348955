"""The tags, attributes and text of HTML, as a browser reads them."""

from html.parser import HTMLParser


class Tags(HTMLParser):
    """Tags that are open, and all attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> Tags:
    """Asserts that every tag is closed."""
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    return tags
