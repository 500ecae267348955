"""Renders a comparison as one self-contained HTML page, without scripts or external resources."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from jaxmha.converters.verify import page_facts, page_pictures
from jaxmha.converters.verify.comparison_report import BlockReport, Report
from jaxmha.converters.verify.page_facts import DIFFERS, LEFT, SAME, Facts
from jaxmha.converters.verify.page_pictures import text
from jaxmha.converters.verify.report import versions

ROWS = 200  # most rows of a table
_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--soft:#6a737d;--line:#d8dee4;--good:#2f8f5b;
--bad:#c0392b;--left:#b98a1d}
@media (prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#d9dee4;--soft:#97a1ac;--line:#39424c;
--good:#56b881;--bad:#f07167;--left:#e0b252}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1.2rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.7rem;margin:.2rem 0 .6rem}h2{font-size:1.15rem;margin:2rem 0 .4rem}
h3{font-size:1rem;margin:1.2rem 0 .2rem}p{margin:.4rem 0}
.verdict{border-left:.5rem solid;padding:.5rem .9rem;font-size:1.1rem}
.verdict.good{border-color:var(--good)}.verdict.bad{border-color:var(--bad)}
.verdict.left{border-color:var(--left)}
.file{margin-left:1rem}.box{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
th,td{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--line)}
th,td{overflow-wrap:normal}td code,td.text{overflow-wrap:anywhere}td code{display:inline-block;min-width:7rem}
code,td.number{font:.85rem/1.5 ui-monospace,monospace}.soft{color:var(--soft)}
svg{max-width:100%;height:auto;display:block}h1 code,h3 code{font-size:1em}
svg .good,.key .good{fill:var(--good);color:var(--good)}svg .bad,.key .bad{fill:var(--bad);color:var(--bad)}
svg .left,.key .left{fill:var(--left);color:var(--left)}svg .ring{fill:none;stroke:currentColor;stroke-width:1.5}
svg .frame{fill:none;stroke:var(--line)}svg .rule{stroke:var(--line);fill:none}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}svg .tick{text-anchor:middle;fill:var(--soft)}
svg .name{text-anchor:end}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def of_files(report: Report, a: Path, b: Path, command: str) -> str:
    """Returns the HTML page of a comparison of two checkpoints.

    Args:
      report: the result of `compare(a, b)`.
      a, b: paths of the checkpoints; they are read again for the digests of their files.
      command: the shell command that makes this page again, shown on the page.

    Raises:
      CheckpointError, OSError: a file cannot be read.
    """
    sources = page_facts.read(a, report), page_facts.read(b, report, second=True)
    body = "\n".join(
        [
            *_verdict(report, sources),
            *_compared(sources),
            *_tensors(report, sources[0]),
            *_blocks(report),
            *_outside(report),
            *_notes(report, command),
        ]
    )
    title = f"{escape(report.verdict)}: {text(a.name)} and {text(b.name)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _verdict(report: Report, sources: Sequence[Facts]) -> Iterable[str]:
    names = " and ".join(f"<code>{text(Path(one.path).name)}</code>" for one in sources)
    kind = "good" if report.same else "bad" if report.different else "left"
    says = {
        "good": "Every tensor of both was compared and is the same.",
        "bad": "At least one compared tensor, block, behaviour or fact differs: see below.",
        "left": "Nothing that was compared differs, but not everything was compared.",
    }
    yield f"<h1>{names}</h1>"
    yield (
        f'<p class="verdict {kind}"><strong>{escape(report.verdict)}</strong><br>{says[kind]}</p>'
    )


def _compared(sources: Sequence[Facts]) -> Iterable[str]:
    yield "<h2>Sources</h2>"
    for which, source in zip(("The first", "The second"), sources, strict=True):
        count = len(source.tensors)
        yield (
            f"<p>{which}: <code>{text(source.path, 400)}</code>, {text(source.format)}, {count:,} "
            f"tensor{'s' * (count != 1)}</p>"
        )
        for one in source.files[:ROWS]:
            yield (
                f"<p class=file><code>{text(one.name)}</code>, {one.size:,} bytes, SHA-256<br>"
                f"<code>{one.sha256}</code></p>"
            )
        yield from _more(len(source.files), "files", 0)
    yield "<p class=soft><code>sha256sum FILE</code> prints the same for the files at hand.</p>"


def _tensors(report: Report, first: Facts) -> Iterable[str]:
    counts = dict.fromkeys((SAME, DIFFERS, LEFT), 0)
    for one in first.tensors:
        counts[one.result] += 1
    only = sum(left.source == "second" for left in report.not_compared)
    yield "<h2>Tensors</h2>"
    yield "<p>One square per tensor of the first source, in the order of the file.</p>"
    rounded = "" if report.dtype is None else f", once rounded to {escape(report.dtype)}"
    yield (
        f"<p class=key><span class=good>■</span> {counts[SAME]:,} the same, bit by bit{rounded} "
        f"<span class=bad>■</span> {counts[DIFFERS]:,} differ <span class=left>■</span> "
        f"{counts[LEFT]:,} not compared</p>"
    )
    yield page_pictures.tensors(first.tensors)
    if len(first.tensors) > page_pictures.CELLS:
        yield f"<p>and {len(first.tensors) - page_pictures.CELLS:,} more</p>"
    if only:
        yield f"<p>{only:,} tensors of the second source have no counterpart in the first.</p>"


def _blocks(report: Report) -> Iterable[str]:
    blocks = page_facts.shown_first(report.blocks)
    if not (blocks or report.only_a or report.only_b):
        return
    yield f"<h2>Attention: {len(blocks)} block{'s' * (len(blocks) != 1)}</h2>"
    yield (
        "<p>Both sources compute every block on the same random inputs, and so does float64 with "
        "the weights of each. The error is the root mean square of the difference, in units of the "
        "error that rounding the exact output to its dtype makes. A ring is the first source, a dot "
        "the second; where they agree, the dot is in the ring.</p>"
    )
    for mask in dict.fromkeys(mask for block in blocks for mask in block.errors):
        yield f"<h3>{escape(mask)}</h3>{page_pictures.errors(blocks, mask)}"
    if len(blocks) > page_pictures.BLOCKS:
        yield f"<p>and {len(blocks) - page_pictures.BLOCKS:,} more blocks</p>"
    yield _table(("block", "layouts", "heads", "result"), [*map(_row, blocks[:ROWS])])
    yield "".join(_more(len(blocks), "blocks", 0))
    for block in [block for block in blocks if not block.same][:ROWS]:
        yield from _difference(block)
    for which, names in (("first", report.only_a), ("second", report.only_b)):
        for name in names[:ROWS]:
            yield f"<p>Only in the {which}: <code>{text(name)}</code></p>"


def _row(block: BlockReport) -> str:
    names = " / ".join(dict.fromkeys(text(x) or "(top)" for x in (block.a, block.b)))
    layouts = " / ".join(dict.fromkeys(map(text, block.layouts)))
    return (
        f"<tr><td><code>{names}</code></td><td>{layouts}</td><td class=number>{block.num_heads}</td>"
        f"<td>{'the same' if block.same else '<strong>different</strong>'}</td></tr>"
    )


def _difference(block: BlockReport) -> Iterable[str]:
    yield f"<h3><code>{text(block.a or block.b or '(top)')}</code></h3>"
    rows = [
        f"<tr><td class=text>{text(str(one), 400)}</td><td>"
        f"{page_pictures.share(one.count, one.size) if one.size else ''}</td></tr>"
        for one in block.differences
    ]
    if rows:
        yield _table(("weights that differ", "elements"), rows)
    yield from (f"<p>Behaviour: {text(one, 400)}</p>" for one in block.behaviour)
    if block.departs is not None:
        yield f"<p>First departs at: {text(block.departs, 400)}</p>"
    if block.explanation is not None:
        yield f"<p><strong>Explained by: {text(block.explanation, 400)}</strong></p>"


def _outside(report: Report) -> Iterable[str]:
    if report.outside:
        yield "<h2>Other tensors that differ</h2>"
        rows = [
            f"<tr><td><code>{text(name)}</code></td><td class=text>{text(how, 400)}</td></tr>"
            for name, how in [*report.outside.items()][:ROWS]
        ]
        yield _table(("tensor", "difference"), rows + _more(len(report.outside), "tensors", 2))
    if report.facts:
        yield "<h2>Facts in no tensor that differ</h2>"
        yield from (f"<p>{text(fact, 2000)}</p>" for fact in report.facts[:ROWS])
    if report.not_compared:
        yield "<h2>Tensors that were not compared</h2>"
        rows = [
            f"<tr><td><code>{text(left.name)}</code></td><td>{text(left.source)}</td>"
            f"<td class=text>{text(left.why, 400)}</td></tr>"
            for left in report.not_compared[:ROWS]
        ]
        rows += _more(len(report.not_compared), "tensors", 3)
        yield _table(("tensor", "source", "reason"), rows)


def _notes(report: Report, command: str) -> Iterable[str]:
    if report.notes:
        yield "<h2>Notes</h2>"
        yield from (f"<p>{text(note, 2000)}</p>" for note in report.notes[:ROWS])
    yield "<h2>To check it again</h2>"
    yield f"<p><code>{text(command, 2000)}</code></p>"
    listed = ", ".join(f"{name} {version}" for name, version in versions().items())
    yield f"<p class=soft>Made with {escape(listed)}.</p>"


def _table(columns: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    return f"<div class=box><table><tr>{head}</tr>{''.join(rows)}</table></div>"


def _more(count: int, what: str, columns: int) -> list[str]:
    """Returns HTML for the number of entries beyond `ROWS`, which are not shown; [] if none is.

    It is a table row, or a paragraph if `columns` is 0.
    """
    if count <= ROWS:
        return []
    shown = f"and {count - ROWS:,} more {what}"
    return [f"<tr><td colspan={columns}>{shown}</td></tr>" if columns else f"<p>{shown}</p>"]
