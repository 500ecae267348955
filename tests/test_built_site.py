"""The site as it is built: links, notebooks, search from a folder, and what a browser shows."""

import doctest
import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.browser import Tab, brightness, browser, needs_browser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIALS = sorted(path.stem for path in (DOCS / "pages" / "tutorials").glob("*.md"))
PHONE, DESKTOP = 390, 1400
SHOWN = ("index", "start", "tutorials/migrate", "how_to/flax", "reference/families")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    command += ["--config-file", str(DOCS / "mkdocs.yml"), "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Documentation built" in done.stderr  # so that warnings would be there too
    assert [line for line in done.stderr.splitlines() if "WARNING" in line] == []
    return folder


@pytest.mark.slow
def test_the_reference_is_built(site: Path) -> None:
    text = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    for name in (
        "flax.attention_fn",
        "converters.torch.path_of",
        "converters.matching.Plan.to_toml",
    ):
        assert f'id="jaxmha.{name}"' in text
    assert "checked where one does" in text  # an argument of every `import_params`
    assert "Flax linen, nnx" in text  # a generated table
    assert "&gt;&gt;&gt;" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
    assert "Unreleased" in (site / "changelog.html").read_text()


def broken(site: Path) -> Iterator[str]:
    """Links of pages to files and anchors that are not there."""
    texts = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    ids = {path: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for path, text in texts.items()}
    for page, text in texts.items():
        for link in re.findall(r'\b(?:href|src)="([^"]+)"', text):
            if re.match(r"(https?|data|mailto):", link):
                continue
            name, _, anchor = unquote(html.unescape(link)).partition("#")
            target = (page.parent / name).resolve() if name else page
            if target.is_dir():
                target = target / "index.html"
            if not target.is_file() or (anchor and anchor not in ids.get(target, {anchor})):
                yield f"{page.relative_to(site)}: {link}"


@pytest.mark.slow
def test_no_link_is_broken(site: Path) -> None:
    assert sorted(set(broken(site))) == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#x">b</a><a href="#y">y</a>')
    (tmp_path / "b.html").write_text('<p id="x"><a href="c.html">c</a><a href="a.html">a</a>')
    assert sorted(broken(tmp_path)) == ["a.html: #y", "b.html: c.html"]


@pytest.mark.parametrize("name", ["hooks", "notebooks"])
def test_examples_of_what_builds_the_site(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    module = import_module(name)
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_notebooks_run(name: str, site: Path, tmp_path: Path) -> None:
    """In a kernel, cell by cell; what is installed already is not installed again."""
    import nbformat
    from nbclient import NotebookClient

    text = (site / "tutorials" / f"{name}.ipynb").read_text()
    assert str(ROOT) not in text
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    install = notebook.cells.pop(0)
    assert install.metadata.tags == ["install"]
    assert all(not cell.get("outputs") for cell in notebook.cells)
    assert sum(cell.cell_type == "code" for cell in notebook.cells) >= 5
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=os.environ | {"PYTHONPATH": path})


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


WIDTHS = "[innerWidth, document.documentElement.scrollWidth, document.body.scrollWidth]"
COLOURS = """(() => {
  const style = getComputedStyle(document.body), ink = getComputedStyle(document.querySelector("h1"));
  return [style.backgroundColor, ink.color];
})()"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_fit(site: Path, tab: Tab, tmp_path: Path, width: int, dark: bool) -> None:
    """Photographs go to the folder of the test."""
    for name in SHOWN:
        assert tab.show(site / f"{name}.html", width, dark=dark) == [], name
        window, *needed = tab.evaluate(WIDTHS)
        assert window == width
        assert max(needed) <= width, name
        paper, ink = (brightness(colour) for colour in tab.evaluate(COLOURS))
        assert (paper < 0.3) == dark, name
        assert abs(paper - ink) > 0.3, name
        tab.photograph(tmp_path / f"{name.replace('/', '-')}-{width}-{dark}.png")


@pytest.mark.slow
@needs_browser
def test_no_page_is_wider_than_a_phone(site: Path, tab: Tab) -> None:
    wide = {}
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html":  # which has absolute links, and is shown by servers alone
            errors = tab.show(path, PHONE)
            needed = max(tab.evaluate(WIDTHS))
            if errors or needed > PHONE:
                wide[str(path.relative_to(site))] = (needed, errors)
    assert wide == {}


OUTSIDE = """[...document.querySelectorAll("text")].filter(text => {
  const {x, y, width, height} = text.getBBox(), {baseVal: view} = document.documentElement.viewBox;
  return x < view.x || y < view.y || x + width > view.x + view.width || y + height > view.y + view.height;
}).map(text => text.textContent)"""


@pytest.mark.slow
@needs_browser
def test_figures_have_all_of_their_text(site: Path, tab: Tab) -> None:
    figures = sorted((site / "explanation").glob("*.svg"))
    assert figures
    for path in figures:
        assert tab.show(path, DESKTOP) == []
        assert tab.evaluate(OUTSIDE) == [], path.name


SEARCH = """(async () => {
  const input = document.querySelector(".md-search__input");
  document.querySelector("#__search").click();
  input.focus();
  input.value = %s;
  input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
  for (let tries = 0; tries < 100; ++tries) {
    const found = document.querySelectorAll(".md-search-result__link");
    if (found.length) return [...found].map(link => link.href);
    await new Promise(wake => setTimeout(wake, 100));
  }
  return [];
})()"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_search_works_from_a_folder(site: Path, tab: Tab, width: int) -> None:
    for page, query, target in (
        ("index", "PagedKVCache", "tutorials/decode.html"),
        ("how_to/masks", "rounding floor", "explanation/accuracy.html"),
    ):
        assert tab.show(site / f"{page}.html", width) == []
        found: list[Any] = tab.evaluate(SEARCH % json.dumps(query))
        assert all(link.startswith("file:") for link in found)
        assert any(target in link for link in found), found
