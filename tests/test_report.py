"""The page of all experiments: made from results alone, whole in one file, and seen by a browser."""

import doctest
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from rich.console import Console

import experiments
from experiments import frame, pages, records
from experiments.fuzz import __main__ as fuzz
from experiments.pages import Page
from experiments.report import __main__ as command
from experiments.report import build, markup, refresh, registry
from experiments.report.registry import EXPERIMENTS, Entry
from experiments.throughput import __main__ as throughput
from tests.browser import CHROMIUM, brightness, needs_browser

FILE = Path(str(records.__file__))
# Questions to a browser: errors, boxes of figures, anchors that lead nowhere, widths, colours.
LISTEN = """<script>
var errors = [];
addEventListener("error", e => errors.push(String(e.message || e.target.outerHTML)), true);
</script>"""
PROBE = """<script>
addEventListener("load", () => {
  const size = box => Math.min(box.width, box.height);
  const figures = [...document.querySelectorAll("figure img")].map(e =>
    [e.alt, size(e.getBoundingClientRect()), e.naturalWidth]);
  const lost = [...document.querySelectorAll("a[href^='#']")].map(e => e.hash.slice(1))
    .filter(id => !document.getElementById(id));
  const style = getComputedStyle(document.body);
  const found = {errors, figures, lost, width: innerWidth, needs: document.body.scrollWidth,
    paper: style.backgroundColor, ink: style.color};
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """Templates, of which a page is rendered once as a row and once as a whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Environment, "from_string", cache(jinja2.Environment.from_string))
        yield


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """Of results whose sources have other digests, which take longer to compute than the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "digest", lambda path: "other")
        yield build.page()


def test_committed_pages_are_what_the_results_make() -> None:
    for path, text in build.files().items():
        assert path.read_text() == text, f"{path}: python -m experiments.report --keep"


def test_every_experiment_has_a_row_and_a_page() -> None:
    programs = {path.parent.name for path in registry.HERE.glob("*/__main__.py")}
    assert programs - {"report"} <= {experiment.name for experiment in EXPERIMENTS}
    table = build.table()
    for experiment in EXPERIMENTS:
        assert experiment.page.question.endswith("?")
        assert table.count(f"| `{experiment.page.command}` |") == 1


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_results_say_what_made_them(experiment: Entry) -> None:
    found = registry.found(experiment)
    if found is None:
        assert "none yet" in build.row(experiment)
        return
    assert re.match(r"\d{4}-\d\d-\d\d · .*python \d", build.origin(found))
    assert found["versions"]["jax"]
    assert found["machine"]
    if experiment.seconds is not None:
        assert found["command"] == experiment.page.command
        assert found["sources"]
        assert "seed" in found


def test_the_page_is_one_file(page: str) -> None:
    """Ids are unique, links lead to some of them, and nothing is loaded."""
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids)) > 10
    targets = re.findall(r'(?:href|src)="([^"]*)"', page) + re.findall(r"url\(([^)]*)\)", page)
    inside = {target[1:] for target in targets if target.startswith("#")}
    assert inside <= set(ids)
    assert all(target.startswith(("#", "data:", "https:")) for target in targets)
    assert not re.search(r"<(script|link|iframe)|@import|src=.https?:", page)
    for experiment in EXPERIMENTS:
        assert f'<h2 id="{experiment.name}">' in page


def test_figures_become_part_of_the_page(tmp_path: Path) -> None:
    text = 'Why.\n\n![What "it" is](a.svg)\n\n![b](b.png)\n\n## So & so\n\n| a |\n|---|\n| 1 |\n'
    (tmp_path / "a.svg").write_text("<svg/>")
    (tmp_path / "b.png").write_bytes(b"PNG")
    html = markup.body(text, tmp_path, "one", {"one"})
    about = "What &quot;it&quot; is"
    assert f'<img class="svg" alt="{about}" src="data:image/svg+xml;base64,PHN2Zy8+">' in html
    assert f"<figcaption>{about}</figcaption>" in html
    assert '<img class="png" alt="b" src="data:image/png;base64,UE5H">' in html
    assert '<h3 id="one-so-so">So &amp; so</h3>' in html
    assert '<div class="table"><table>' in html


def test_links_stay_on_the_page(tmp_path: Path) -> None:
    text = "[a](../heads/) [b](results.json) [c](https://x.org)"
    html = markup.body(text, tmp_path, "one", {"heads"})
    assert html == '<p><a href="#heads">a</a> b <a href="https://x.org">c</a></p>'


ABOUT = {"date": "2026-01-02", "versions": {"python": "3"}}
READER = {"seconds": 1800, "executions": 12345, "coverage": 67, "findings": 0}
NOT_RUN_YET = {
    "fuzz": (
        {"about": ABOUT, "readers": {"npz": READER, "torch": READER}},
        "No: 24,690 inputs in 1.0 hours, 2 readers.",
        "| npz | 12,345 | 67 | 0 |",
    ),
    "throughput": (
        {
            "about": ABOUT,
            "bytes": 2**31,
            "seconds": {"copy": [1.0, 3.0, 2.0], "migrate": [2.5]},
            "throughput_of_copy": 0.8,
            "peak_mib": 99,
            "largest_tensor_mib": 48,
        },
        "At 0.80 of the rate of a copy, with at most 99 MiB above what the process held",
        "| copy | 2.00 | 1074 |",
    ),
}


@pytest.mark.parametrize("name", NOT_RUN_YET)
def test_pages_that_wait_for_results(name: str) -> None:
    found, conclusion, line = NOT_RUN_YET[name]
    (experiment,) = (e for e in EXPERIMENTS if e.name == name)
    text = build.readme(experiment, found)
    assert f"**{conclusion}" in text
    assert line in text
    assert text.endswith("· 2026-01-02 · python 3\n")


def test_the_first_paragraph_is_the_conclusion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "HERE", tmp_path)
    (tmp_path / "page.md").write_text(
        "question: Why?\ncommand: c\n\nSo it\nis {{ found.date }}.\n\nHow.\n"
    )
    text = build.readme(of("why", Page("page.md")), ABOUT)
    start = "# Why?\n\n**So it is 2026-01-02.**\n\nHow.\n\n---\n\n"
    assert text == f"{start}`c` · 2026-01-02 · python 3\n"


@pytest.mark.parametrize("name", ["numerics.figure", "numerics.page", "claims.claims", "pages"])
def test_examples(name: str) -> None:
    result = doctest.testmod(import_module(f"experiments.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def of(name: str, page: Any) -> Entry:
    """An experiment whose page is not a module."""

    class Given(Entry):
        @property
        def page(self) -> Any:
            return page

    return Given(name, seconds=1)


def test_failures_are_named_and_the_rest_runs() -> None:
    fine = SimpleNamespace(command="python -c 'print(1)'")
    wrong = SimpleNamespace(command="python -c 'raise SystemExit(\"no luck\")'")
    console = Console(quiet=True)
    failed = refresh.remake([of("a", wrong), of("b", fine)], console)
    assert failed == {"a": "no luck"}


def test_changed_sources_make_results_stale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(records, "loaded", lambda: {"experiments/records.py": records.digest(FILE)})
    path = tmp_path / "results.json"
    assert records.stale(path) == "there is none"
    records.save(path, {"n": 1}, command="c", seed=0, sources={"experiments/gone.py": "0"})
    assert records.stale(path) == "experiments/gone.py changed"
    records.save(path, {"n": 1}, command="c")
    assert records.stale(path) is None


@pytest.mark.slow
def test_words_do_not_make_results_stale() -> None:
    """Pages are loaded here, and are no sources of results."""
    assert EXPERIMENTS[0].page
    loaded = records.loaded()
    assert "experiments/report/build.py" in loaded
    assert not [name for name in loaded if name.endswith("/page.py")]


def test_the_command_line(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    some = EXPERIMENTS[:3]
    monkeypatch.setattr(command, "EXPERIMENTS", some)
    monkeypatch.setattr(build, "page", lambda: page)
    monkeypatch.setattr(registry, "stale", lambda experiment: None)
    monkeypatch.setattr(build, "files", dict)  # which writes nothing either
    assert command.main(["--check"]) == 0
    assert capsys.readouterr().out == "nothing is stale\n"
    monkeypatch.setattr(registry, "stale", lambda experiment: "other")
    assert command.main(["--check"]) == 1
    assert f"{some[0].name}: other" in capsys.readouterr().out
    assert command.main(["--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in listed] == [experiment.name for experiment in some]
    assert listed[0]["stale"] == "other"
    for wrong in (["--remake", "nothing"], ["--keep", "--remake", "all"]):
        with pytest.raises(SystemExit) as exit:
            command.main(wrong)
        assert exit.value.code == 2
    assert command.main(["--keep", "--output", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").read_text() == page


def test_where_no_page_can_be_written_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "make", None)
    with pytest.raises(SystemExit, match="2"):
        command.main(["--output", "/proc/page.html"])
    assert (
        capsys.readouterr().err
        == "/proc: results cannot be stored there: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModuleNotFoundError("no", name="optax"), 2, "optax is not installed\n"),
        (PackageNotFoundError("atheris"), 2, "atheris is not installed\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_a_command_ends_with_a_message(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=str(code)):
        experiments._end(type(error), error, None)
    assert capsys.readouterr().err == message
    assert sys.excepthook is not experiments._end  # of a program that imports them


ENDS = {
    "missing": ("raise ModuleNotFoundError(name='optax')", 2, "optax is not installed\n"),
    "stopped": ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", 130, "stopped\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_python_ends_a_command_with_that_message(name: str, tmp_path: Path) -> None:
    source, code, message = ENDS[name]
    (tmp_path / "optax.py").write_text(source)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train"], cwd=records.ROOT, check=False,
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, message)


def test_libraries_are_asked_for_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(fuzz, "version", absent)
    monkeypatch.setattr(fuzz, "soak", None)
    with pytest.raises(SystemExit, match="2"):
        frame.run(fuzz.EXPERIMENT, ["--reader", "npz"])
    assert capsys.readouterr().err == "No package metadata was found for atheris\n"


@pytest.mark.parametrize("wrong", ["--size=0", "--size=-1", "--size=67141631"])
def test_throughput_needs_a_whole_block(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        frame.run(throughput.EXPERIMENT, [wrong])
    assert f"--size: must be at least {throughput.BLOCK}, got" in capsys.readouterr().err


class Moved(Entry):
    """An experiment in another folder."""

    @property
    def results(self) -> Path:
        return Path(self.result)

    @property
    def folder(self) -> Path:
        return self.results.parent


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of one experiment's folder, which is all that there is."""
    (experiment,) = (e for e in EXPERIMENTS if e.name == "heads")
    folder = tmp_path / "heads"
    shutil.copytree(experiment.folder, folder, ignore=shutil.ignore_patterns("*.py*"))
    moved = Moved("heads", 1, str(folder / "results.json"))
    monkeypatch.setattr(command, "EXPERIMENTS", (moved,))
    monkeypatch.setattr(build, "page", lambda: build.section(moved, set())["body"])
    monkeypatch.setattr(build, "files", dict)
    monkeypatch.setattr(records, "digest", lambda path: "same")
    stored = json.loads(moved.results.read_text())
    stored["sources"] = dict.fromkeys(records.loaded(), "same")
    moved.results.write_text(json.dumps(stored))
    return folder


DAMAGE = {
    "cut off": ("results.json", "{"),
    "no object": ("results.json", "[]"),
    "no figure": ("script.svg", None),
}


def test_results_of_other_code_are_named(heads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = json.loads((heads / "results.json").read_text())
    kept = ("sources", "command", "date")
    (heads / "results.json").write_text(json.dumps({key: stored[key] for key in kept}))
    assert command.main(["--check"]) == 1
    assert "results.json has no" in capsys.readouterr().out
    assert command.main(["--keep", "--output", str(heads / "page.html")]) == 2
    assert capsys.readouterr().err.count("other code made it") == 1


@pytest.mark.everyday(name=["cut off", "no figure"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_named_or_made_again(
    name: str, heads: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = heads / "page.html"
    keep = ["--keep", "--output", str(target)]
    assert command.main(["--check"]) == command.main(keep) == 0
    file, damage = DAMAGE[name]
    whole = (heads / file).read_text()
    (heads / file).unlink() if damage is None else (heads / file).write_text(damage)
    target.unlink()
    capsys.readouterr()

    assert command.main(["--check"]) == 1
    printed = capsys.readouterr()
    assert printed.out.count(file) == 1
    assert command.main(keep) == 2
    printed = capsys.readouterr()
    assert printed.err.count("heads:") == printed.err.count(file) == 1
    assert not target.exists()
    assert command.main(["--json"]) == 0
    assert file in json.loads(capsys.readouterr().out)[0]["stale"]

    def remake(experiments: Any, console: Console) -> dict[str, str]:
        if experiments:
            (heads / file).write_text(whole)
        return {}

    monkeypatch.setattr(refresh, "remake", remake)
    assert command.main(["--output", str(target)]) == 0
    assert "<img" in target.read_text()


def test_the_page_says_what_is_not_run_again(heads: Path) -> None:
    def made() -> str:
        return build.section(Moved("heads", None, str(heads / "results.json")), set())["made"]

    stored = json.loads((heads / "results.json").read_text())
    assert "Older" not in made()
    for sources, texts in (
        ({"gone.py": "0", **stored.pop("sources")}, "Older than the code: gone.py changed."),
        (None, "not known"),
    ):
        given = stored if sources is None else {**stored, "sources": sources}
        (heads / "results.json").write_text(json.dumps(given))
        assert texts in made()


def seen(html: str, folder: Path, *options: str) -> dict[str, Any]:
    """Findings of a browser on a page, and its messages."""
    path = folder / "page.html"
    path.write_text(html.replace("<head>", f"<head>{LISTEN}").replace("</body>", f"{PROBE}</body>"))
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *(f"--user-data-dir={folder / 'profile'}", *options, "--dump-dom", path.as_uri()),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text is not None, done.stderr
    found: dict[str, Any] = json.loads(
        text[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    )
    found["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return found


@needs_browser
@pytest.mark.slow_variants("1400*")
@pytest.mark.parametrize(
    ("width", "options"), [(1400, ()), (400, ("--blink-settings=preferredColorScheme=0",))]
)
def test_a_browser_shows_everything(
    page: str, tmp_path: Path, width: int, options: tuple[str, ...]
) -> None:
    found = seen(page, tmp_path, f"--window-size={width},900", *options)
    assert found["errors"] == found["console"] == found["lost"] == []
    assert len(found["figures"]) == page.count("<figure>") > 4
    assert all(box > 50 and drawn > 50 for _, box, drawn in found["figures"]), found["figures"]
    assert found["width"] == max(width, 500)  # no window is narrower
    assert found["needs"] <= found["width"]  # wide tables and figures scroll in their own boxes
    dark = bool(options)
    assert (brightness(found["paper"]) < 0.2) == dark
    assert abs(brightness(found["paper"]) - brightness(found["ink"])) > 0.6


@pytest.mark.slow
@needs_browser
def test_a_browser_notices_what_is_wrong(tmp_path: Path) -> None:
    html = """<!doctype html><html><head></head><body><a href="#no">no</a>
<figure><img alt="no" src="data:image/png;base64,AAAA"></figure>
<div style="width:3000px">wide</div>
<script>console.error("said"); throw Error("thrown")</script></body></html>"""
    found = seen(html, tmp_path, "--window-size=800,600")
    assert "Uncaught Error: thrown" in found["errors"]
    assert any("said" in line for line in found["console"])
    assert found["lost"] == ["no"]
    assert [drawn for *_, drawn in found["figures"]] == [0]
    assert found["needs"] > found["width"]
