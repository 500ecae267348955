"""`jaxmha verify --html`: a page that shows itself, whatever the names in the files."""

import hashlib
import json
import re
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import comparison, comparison_report, page, page_facts
from tests.browser import CHROMIUM, needs_browser
from tests.converters.command_line import cli
from tests.html_tags import parsed
from tests.masks.draws import numbers

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>\u202e&amp;'
LONG = "n" * 1000


def state(*blocks: str, **more: NDArray) -> dict[str, NDArray]:
    """Blocks of torch, each with weights of its own, and further tensors."""
    found = {}
    for seed, block in enumerate(blocks):
        found[f"{block}.in_proj_weight"] = numbers(18, 6, seed=seed)
        found[f"{block}.out_proj.weight"] = numbers(6, 6, seed=seed + 9)
    return {name: array.astype(np.float32) for name, array in (found | more).items()}


def files(folder: Path) -> tuple[Path, Path]:
    """Two checkpoints: one block and one other tensor differ, and one is in the second alone."""
    a = state("a.0", f"{HOSTILE}.1", "a.2", other=np.ones(3), **{LONG: np.ones(5)})
    b = a | {
        f"{HOSTILE}.1.in_proj_weight": a[f"{HOSTILE}.1.in_proj_weight"] + np.eye(18, 6, dtype="f"),
        "other": np.array([1, 2, 1], np.float32),
        "more": np.ones(2, np.float32),
    }
    paths = folder / "a&b.safetensors", folder / "b.safetensors"
    for path, arrays in zip(paths, (a, b), strict=True):
        checkpoint.write(path, arrays)
    return paths


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("page")
    a, b = files(folder)
    options = ["--num-heads", "2", "--html", str(folder / "page.html")]
    done = cli("verify", a, b, *options)
    assert done.exit_code == 1, done.output
    return (folder / "page.html").read_text(), (a, b)


def test_names_are_text(made: tuple[str, tuple[Path, Path]]) -> None:
    html, _ = made
    tags = parsed(html)
    assert not tags.names & {"script", "img", "a", "link", "iframe"}
    assert not [name for name, _ in tags.attributes if name.startswith("on") or name == "src"]
    assert "\u202e" not in html
    assert "<script>alert(1)</script>" in tags.text
    assert LONG[:90] in html
    assert LONG[:200] not in html
    assert "default-src 'none'" in html


def test_the_page_says_what_the_report_says(made: tuple[str, tuple[Path, Path]]) -> None:
    html, (a, b) = made
    text = parsed(html).text
    for path in (a, b):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in text
        assert f"{path.stat().st_size:,} bytes" in text
    report = comparison.compare(a, b, num_heads=2)
    assert report.verdict in text
    assert "6 the same, bit by bit ■ 2 differ ■ 0 not compared" in text
    assert "1 tensors of the second source" in text or "1 tensor of the second source" in text
    assert "1 of 3 elements differ" in text
    assert "query.kernel[0, 0, 0]" in text
    assert f"jaxmha verify '{a}' {b} --num-heads 2" in text
    for block in report.blocks:
        first, second = block.errors["causal"]
        assert f"{first:.4g} and {second:.4g}" in text


def test_every_tensor_has_its_result(made: tuple[str, tuple[Path, Path]]) -> None:
    _, (a, b) = made
    report = comparison.compare(a, b, num_heads=2)
    first, second = page_facts.read(a, report), page_facts.read(b, report, second=True)
    assert {one.name for one in first.tensors if one.result == page_facts.DIFFERS} == {
        "other",
        f"{HOSTILE}.1.in_proj_weight",
    }
    assert [one.name for one in second.tensors if one.result == page_facts.LEFT] == ["more"]


# The first and the second, but for the block, and the tensors that differ in each: of a linear layer of
# two frameworks, and of one array under two tied names.
RENAMED: dict[str, Any] = {
    "framework": ("pt", {"fc.weight": 0}, "npz", {"fc/kernel": 1}),
    "tied": ("safetensors", {"emb": 0}, "pt", {"head": 1}),
    "tied in the second": ("pt", {"head": 1}, "safetensors", {"emb": 0}),
}


@pytest.mark.parametrize("kind", RENAMED)
def test_a_tensor_of_another_name_differs_in_both(kind: str, tmp_path: Path) -> None:
    found, paths = [], []
    for which, ending, own in zip("ab", RENAMED[kind][::2], RENAMED[kind][1::2], strict=True):
        path, tied = (
            tmp_path / f"{which}.{ending}",
            {"head": "emb"} if ending == "safetensors" else {},
        )
        arrays = {name: np.full((3, 3), value) for name, value in own.items()}
        checkpoint.write(path, state("x", **arrays), metadata=tied)
        paths.append(path)
    report = comparison.compare(*paths, num_heads=2)
    for second, path in enumerate(paths):
        tensors = page_facts.read(path, report, bool(second)).tensors
        found.append({one.name for one in tensors if one.result == page_facts.DIFFERS})
    assert found == [{*RENAMED[kind][1]}, {*RENAMED[kind][3]}]


def test_the_same_sources(tmp_path: Path) -> None:
    a, _ = files(tmp_path)
    html = page.of_files(comparison.compare(a, a, num_heads=2), a, a, "again")
    assert "8 the same, bit by bit ■ 0 differ" in parsed(html).text
    assert 'class="verdict good"' in html


def test_a_block_without_a_counterpart_is_not_called_the_same(tmp_path: Path) -> None:
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    checkpoint.write(a, state("x", "y"))
    checkpoint.write(b, state("x"))
    report = comparison.compare(a, b, num_heads=2)
    facts = page_facts.read(a, report)
    assert [one.result for one in facts.tensors] == [page_facts.SAME] * 2 + [page_facts.LEFT] * 2
    assert "Only in the first: y" in parsed(page.of_files(report, a, b, "")).text


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    a, b = files(tmp_path)
    target = tmp_path / "page.html"
    target.write_text("mine")
    command = ["verify", str(a), str(b), "--num-heads", "2", "--html"]
    done = cli(*command, target)
    assert done.exit_code == 2
    assert "--force" in done.output
    assert target.read_text() == "mine"
    assert cli(*command, target, "--force").exit_code == 1
    assert target.read_text().startswith("<!doctype html>")
    before = b.read_bytes()
    assert cli(*command, b, "--force").exit_code == 2
    assert b.read_bytes() == before
    assert [
        path.name for path in tmp_path.iterdir() if path.suffix not in (".html", ".safetensors")
    ] == []


def test_many_blocks_and_tensors_stay_a_page() -> None:
    block = comparison_report.BlockReport(
        LONG, LONG, ("torch", "flax"), 2, ("float32",) * 2, ("float32",) * 2, (), (), {"no mask": (1.0, np.inf)},
        None, None, same=False,
    )  # fmt: skip
    report = comparison_report.Report(
        (block,) * 3000, outside={f"t{i}": "how" for i in range(3000)}
    )
    tensors = tuple(page_facts.TensorFacts(LONG, "float32", (3,), "same") for _ in range(9000))
    facts = page_facts.Facts("a", "npz", (), tensors)
    parts = [*page._tensors(report, facts), *page._blocks(report), *page._outside(report)]
    html = "".join(parts)
    assert len(html) < 2_000_000
    for phrase in ("and 5,000 more", "and 2,900 more blocks", "and 2,800 more tensors"):
        assert phrase in html
    parsed(html)


PROBE = """<!doctype html><iframe style="border:0;width:WIDTHpx" srcdoc="PAGE"></iframe><script>
addEventListener("load", () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument;
  const found = {width: frame.clientWidth, needs: page.documentElement.scrollWidth,
    paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    drawn: page.querySelectorAll("svg").length};
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
});</script>"""


@needs_browser
@pytest.mark.slow_variants("light")
@pytest.mark.parametrize(("width", "scheme"), [(1200, "1"), (360, "0")], ids=["light", "dark"])
def test_a_browser_shows_it(
    made: tuple[str, tuple[Path, Path]], tmp_path: Path, width: int, scheme: str
) -> None:
    """As wide as a desktop and a phone, light and dark."""
    framed = PROBE.replace("WIDTH", str(width)).replace("PAGE", escape(made[0]))
    (tmp_path / "page.html").write_text(framed)
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"),
            f"--user-data-dir={tmp_path / 'profile'}",
            *(f"--blink-settings=preferredColorScheme={scheme}", "--dump-dom"),
            (tmp_path / "page.html").as_uri(),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text is not None, done.stdout[-2000:]
    found: dict[str, Any] = json.loads(text[1])
    assert found["needs"] <= found["width"] == width
    assert found["drawn"] > 3
    dark = sum(map(int, re.findall(r"\d+", found["paper"])[:3])) / 765 < 0.2
    assert dark == (scheme == "0")
