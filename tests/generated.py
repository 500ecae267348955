"""Parts of the README and of the site that are generated from data: `python -m tests.generated`."""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxmha.converters.layout import registry

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/jaxmha/jaxmha"


def demo() -> str:
    """The demo's conclusion, from its committed results."""
    results = json.loads((ROOT / "experiments/real_weights/results.json").read_text())
    same = sum(row["identical"] for row in results["blocks"])
    return (
        f"`make demo` converts published weights into real layers of every framework and back: {same} of "
        f"{len(results['blocks'])} attention blocks come back bit-identical ({results['date']}; "
        f"[each of them]({REPOSITORY}/blob/main/experiments/real_weights/README.md), with the error of every framework)."
    )


def pure() -> str:
    """Times without native kernels, in a full benchmark of before they came."""
    from experiments.benchmarks.report import RESULTS, WITHOUT_NATIVE, headlines, latest

    results = json.loads((RESULTS / WITHOUT_NATIVE / "full.json").read_text())
    table = json.loads((RESULTS / f"{latest()}.json").read_text())
    forward, backward, on_jax, *_ = headlines(results)
    slower, shapes = (forward[key] + backward[key] for key in ("slower", "shapes"))
    faster = on_jax["shapes"] - on_jax["slower"]
    return (
        "Without the native kernels, in pure JAX, such a layer takes "
        f"{forward['mean']:.2f} of the time of the fastest peer (worst {forward['worst']:.2f}), with gradients "
        f"{backward['mean']:.2f} (worst {backward['worst']:.2f}), on {results['machine']['processor']}: it is slower "
        f"than the fastest, mostly torch, in {slower} of {shapes} shapes, and faster than Flax, Keras on JAX and "
        f"`jax.nn` in {faster} of {on_jax['shapes']} "
        f"([every case]({REPOSITORY}/blob/main/experiments/benchmarks/results/{WITHOUT_NATIVE}/full.md)). It is of "
        f"{results['date']}; the table of the README, of {table['date']}, has them."
    )


def layouts() -> str:
    """Every layout with the class it belongs to and an example entry."""
    lines = ["| layout | of | for example |", "|---|---|---|"]
    for layout in registry.LAYOUTS:
        entry = layout.entries[0]
        lines.append(f"| `{layout.name}` | {layout.about} | `{entry.key}`: `{entry.axes}` |")
    return "\n".join(lines)


# Module of the masks, and what it is in words.
MASKS = {
    "torch": "torch `nn.MultiheadAttention`", "sdpa": "torch SDPA", "keras": "Keras MHA, GQA",
    "flax": "Flax linen, nnx", "equinox": "equinox", "jax": "`jax.nn`",
    "huggingface": "transformers", "handwritten": "hand-written layers",
}  # fmt: skip
OUTPUTS = {"nan": "NaN", "zero": "0"}
OTHER = {"nonzero": "nonzero is True", "added": "floats are added", "refused": "refused"}


def masks() -> str:
    """Every mask argument of every framework, from the tables of `converters/masks`."""
    lines = [
        "| framework | argument | True means | other dtypes | axes | row with nothing left |",
        "|---|---|---|---|---|---|",
    ]
    for module, name in MASKS.items():
        for row in import_module(f"jaxmha.converters.masks.{module}").ARGUMENTS:
            lengths = row.field.endswith("lengths")
            polarity = "attend" if row.keep else "**blocked**"
            cells = (
                "–" if lengths or row.name == "bias" else polarity,
                "integers" if lengths else OTHER[row.other],
                "<br>".join(f"`{axes}`" for axes in row.axes),
                ", ".join(
                    f"{path}: {OUTPUTS.get(output, output)}".removeprefix(": ")
                    for path, output in row.empty
                ),
            )
            lines.append(f"| {name} | `{row.name}` | {' | '.join(cells)} |")
            name = ""
    return "\n".join(lines)


def values(p: Any) -> str:
    """The values that an option takes, and its default, as they follow its help."""
    given = p.opts[0].startswith("-")
    kind, default = p.type_descriptor.annotation, getattr(p.default, "value", p.default)
    chosen = given and isinstance(kind, type) and issubclass(kind, Enum)
    named = [f"`{x.value}`" for x in kind] if chosen else []
    text = f" Values: {', '.join(named)}." * bool(named)
    if p.required and given:
        return f"{text}  [required]"
    shown = default is not None and not getattr(p, "is_flag", False)
    return f"{text}  [default: {default}]" if shown else text


def commands() -> str:
    """Every command with its arguments, options and examples, as the program itself has them."""
    import typer

    from jaxmha.cli.app import app

    def described(name: str, command: Any) -> Iterator[str]:
        if hasattr(command, "commands"):
            for inner, one in command.commands.items():
                yield from described(f"{name} {inner}", one)
            return
        arguments = [p for p in command.params if not p.opts[0].startswith("-")]
        options = [p for p in command.params if p.opts[0].startswith("-")]
        usage = " ".join(["jaxmha", name, *(p.name.upper() for p in arguments)])
        yield f"## {name}\n\n{command.help}\n\n```text\n{usage}{' [OPTIONS]' * bool(options)}\n```\n"
        yield "| argument or option | meaning |\n|---|---|"
        for p in (*arguments, *options):
            shown = p.name.upper() if p in arguments else ", ".join((*p.opts, *p.secondary_opts))
            value = f" {p.metavar}" if p.metavar and p in options else ""
            text = ((p.help or "") + values(p)).replace("|", "\\|")
            text = re.sub(r"hf://\S*[A-Z]", r"`\g<0>`", text)  # code breaks where a phone ends
            yield f"| `{shown}{value}` | {text} |"
        examples = re.findall(r"^ *(jaxmha .*)$", command.epilog or "", flags=re.MULTILINE)
        yield "\n```text\n" + "\n".join(f"$ {line}" for line in examples) + "\n```\n"

    root: Any = typer.main.get_command(app)
    lines = [f"`jaxmha {p.opts[0]}`: {p.help}\n" for p in root.params]
    lines += (line for name, one in root.commands.items() for line in described(name, one))
    return "\n".join(lines)


def formats() -> str:
    """Every format of files, from the table of formats."""
    from jaxmha.checkpoint.formats.table import FORMATS

    lines = ["| format | names of files | written too | holds metadata |", "|---|---|---|---|"]
    for row in FORMATS:
        names = ", ".join(f"`{suffix}`" for suffix in row.suffixes)
        cells = (names, "yes" if row.write or row.sharded or row.folder else "no")
        lines.append(
            f"| {row.name} | {' | '.join(cells)} | {'yes' if row.holds_metadata else 'no'} |"
        )
    return "\n".join(lines)


def canonical(name: str) -> str:
    """A name of a package as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def versions() -> str:
    """Packages that users have, with the versions that are allowed and tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()[1:]
    tested = {canonical(name): number for name, number in (line.split("==") for line in lines)}
    (named,) = re.findall(r"for x in \((.*?)\)", (ROOT / ".ci" / "versions").read_text())
    extras = project["optional-dependencies"]
    rows = ["| package | allowed | suite | lowest is tested |", "|---|---|---|---|"]
    for extra in ("", *extras):
        for requirement in extras[extra] if extra else project["dependencies"]:
            name, allowed = re.findall(r"^([\w-]+)(?:\[.*\])?(>=[\d.]+)?", requirement)[0]
            if name not in ("jaxmha", "jaxmha-cpu"):
                lowest = "yes" if not extra or f'"{extra}"' in named else "no"
                shown = f"`{name}`" + f", extra `{extra}`" * bool(extra)
                cells = (allowed or "as `jax`", tested.get(canonical(name), "not run"), lowest)
                rows.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(row for row in rows if "as `jax`" not in row)


def accuracy() -> str:
    """The conclusion of the experiment on errors."""
    from experiments import records
    from experiments.pages import Page

    found = records.load(ROOT / "experiments" / "numerics" / "results.json")
    page = f"{REPOSITORY}/blob/main/experiments/numerics/README.md"
    return f"{Page('numerics/page.md').conclusion(found)} [Every number]({page})."


def declined() -> str:
    """The requests that the native kernels decline, by the reasons that `explain` gives."""
    from jaxmha.implementations.native.attention import DECLINED

    return "\n".join("- " + reason.format("...") for reason in DECLINED.values())


PAGES = ROOT / "docs" / "pages" / "reference"
PARTS = (
    (PAGES.parent / "explanation" / "accuracy.md", "demo", demo),
    (PAGES.parent / "how_to" / "native.md", "pure", pure),
    (PAGES.parent / "how_to" / "native.md", "declined", declined),
    (PAGES / "layouts.md", "layouts", layouts),
    (PAGES / "masks.md", "masks", masks),
    (PAGES / "commands.md", "commands", commands),
    (PAGES / "formats.md", "formats", formats),
    (PAGES / "versions.md", "versions", versions),
    (PAGES.parent / "explanation" / "accuracy.md", "accuracy", accuracy),
)


def filled(text: str, name: str, part: str) -> str:
    """A page whose generated part is as it should be."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, rest = text.split(start)
    return f"{before}{start}{part}\n{end}{rest.split(end)[1]}"


def notebooks() -> dict[Path, str]:
    """The notebook of every tutorial, in the folder of its page."""
    sys.path.append(str(ROOT / "docs"))
    notebook = import_module("notebooks").notebook
    pages = sorted((PAGES.parent / "tutorials").glob("*.md"))
    return {page.with_suffix(".ipynb"): f"{notebook(page.read_text())}\n" for page in pages}


if __name__ == "__main__":
    for path, text in notebooks().items():
        path.write_text(text)
    for path, name, make in PARTS:
        path.write_text(filled(path.read_text(), name, make()))
