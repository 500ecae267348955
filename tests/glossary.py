"""Checks that code and documents use the field's words: `python -m tests.glossary [folder ...]`.

A rule names a word to avoid, the word to use, and the places where the word has the meaning to
avoid. Words that are also plain English have patterns for that meaning alone. `avoid` and `fine`
are examples of each; tests hold the rules to them.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SHIPPED = ("jaxmha", "converters")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")
TESTS = "tests"  # not their messages; of models that are compared only the names of tests
COMPARED = ("tests/zoo/",)
EXPERIMENTS = "experiments"
GENERATED = ("docs/pages/experiments/",)
EVERYWHERE = ("",)
STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|.)*?"""|'
    r"'''(?:\\.|.)*?'''|"
    r'"(?:\\.|[^"\\\n])*"|'
    r"'(?:\\.|[^'\\\n])*'|#[^\n]*",
    re.DOTALL,
)
FIELDS = frozenset({"id", "arg", "attr", "name", "asname"})  # of a node that names something
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CORE = (
    "jaxmha/implementations/",
    "jaxmha/attention.py",
    "jaxmha/cached_attention.py",
    "jaxmha/cached_step.py",
)
VERIFY = ("converters/verify/", "jaxmha/cli/diff.py", "jaxmha/cli/verify.py")
CONVERT = ("converters/", "jaxmha/cli/", "docs/", "README.md")


class Name(NamedTuple):
    """A word that no identifier has as a part (`kept_beside`, `BlockSide`), in these places."""

    pattern: str
    use: str
    avoid: tuple[str, ...]
    where: tuple[str, ...] = EVERYWHERE
    fine: tuple[str, ...] = ()
    whole: bool = False  # True: only the whole identifier, without leading underscores


class Text(NamedTuple):
    """A pattern that no comment, docstring, message or document has, in these places."""

    pattern: str
    use: str
    avoid: tuple[str, ...]
    where: tuple[str, ...] = EVERYWHERE
    fine: tuple[str, ...] = ()


NAMES = (
    Name("slopes?", "gradient, cotangent", ("slope", "key_slopes"), fine=("sloped",)),
    Name("answers?", "output, result", ("answer", "_answer_of")),
    Name("highest", "row_max", ("highest",), (*CORE, *VERIFY)),
    Name("total", "row_sum", ("total",), ("jaxmha/implementations/", "converters/verify/oracle.py")),
    Name("shrink", "alpha", ("shrink",), CORE),
    Name("cuts?", "tile, tiling", ("cut", "Cuts"), CORE),
    Name("rules", "config", ("rules", "_RULES"), fine=("lint_rules",), whole=True),
    Name("words", "seed, text", ("words", "_words"), fine=("stop_words",), whole=True),
    Name("there", "present, valid", ("there", "_there", "kind_there")),
    Name("live", "valid, attended", ("live", "live_rows"), CORE),
    Name("places", "shardings", ("places",), ("jaxmha/sharding.py", "converters/sharded/")),
    Name("spread", "sharding", ("spread", "Spread")),
    Name("pairs", "block_mask", ("pairs",), ("jaxmha/implementations/",), ("allowed_pairs",), True),
    Name("reach", "schedule", ("reach",), CORE),
    Name("beside", "next to, alongside", ("beside", "_BESIDE")),
    Name("sides?", "source, operand", ("side", "BlockSide"), VERIFY),
    Name("moves?", "lazy tensor, step", ("move", "Moves"), ("converters/", "jaxmha/cli/"),
         ("moveaxis",)),
    Name("neighbours?", "other_layer", ("neighbour", "_neighbours")),
    Name("mistakes?", "diagnosis", ("Mistake", "MISTAKES")),
    Name("stored", "file layer", ("Stored",), ("converters/verify/",), whole=True),
    Name("refusals?", "error", ("refusals", "refusal")),
    Name("verbs?", "api", ("verbs",)),
    Name("engine", "transform", ("engine",)),
    Name("told|said", "known, stated", ("told", "_SAID")),
    Name("aim", "target", ("aim",)),
)  # fmt: skip
# Names that must stay -> where and why.
KEPT = {
    ("jaxmha/mods/scores.py", "slopes"): "ALiBi's word",
    ("converters/migrate/__init__.py", "Move"): "the former name of Step, for existing imports",
    ("converters/migrate/lazy_tensors.py", "move_to_end"): "of OrderedDict",
    ("experiments/claims/blog.py", "there"): "a key of stored results",
    ("experiments/recipes/bert.py", "words"): "BERT's word embeddings",
    ("tests/match/strangers.py", "words"): "a layer that a match has to find",
}
# Words of others that are part of public names.
OF_OTHERS = ("alibi_slopes",)
TEXTS = (
    Text(r"\bbeside\b", "next to, alongside", ("the file beside it",), fine=("besides, it is",)),
    Text(r"(?<!ALiBi )(?<!ALiBi's )(?<!`)\bslopes?\b(?!:)", "gradient", ("its slope is",),
         fine=("ALiBi slopes per head", "slopes: one per head", "`slopes[n]`")),
    Text(r"\b(the|its|an|whose|their|\w+'s) answers?\b|\bframeworks? answers?\b"
         r"|\banswers? (0|NaN|as|something|with)\b", "output, return", ("the answer is 0",),
         fine=("questions that this answers",)),
    Text(r"\bhighest (logit|score)s?\b", "row max", ("the highest logit",)),
    Text(r"\bshrinks?\b", "rescales", ("it shrinks the sum",)),
    Text(r"\b(a|the|each|one) cut\b|\bcuts of\b", "tile", ("the cut of scores",), CORE,
         ("cut into tiles",)),
    Text(r"\b(the|a|its) reach\b", "schedule", ("the reach of a block",), CORE,
         ("keys that rows reach",)),
    Text(r"\blive (rows?|keys?|pairs?|positions?|cells?|blocks?|tiles?|queries)\b",
         "attended, valid", ("live keys",), fine=("a live layer",)),
    Text(r"\bspread (over|across)\b", "sharded", ("arrays spread over devices",)),
    Text(r"\bwords of (the|a) (key|seed)\b", "seed", ("words of the key",)),
    Text(r"\bwhat (lies|travels|is told|is asked|stands|comes|was asked)\b",
         "say who does what", ("what lies outside",), fine=("it asks what to do",)),
    Text(r"\b(on|in|of) (one|both|either|the other) sides?\b|\b(two|both) sides\b"
         r"|\bone side (has|alone)\b", "source, operand", ("zeros on one side",),
         CONVERT, ("the left-hand side",)),
    Text(r"\bneighbours?\b", "other layers", ("attention and its neighbours",),
         fine=("neighbouring",)),
    Text(r"(?<!by )\bmistakes?\b", "error", ("a known mistake",), fine=("by mistake",)),
    Text(r"\brefusals?\b", "error", ("the refusal says",), fine=("it refuses",)),
    Text(r"\bverbs?\b", "functions", ("the verbs of a module",)),
    Text(r"\bengine\b", "transform", ("the engine",)),
    Text(r"\b(made|make|makes) anew\b|\bgoes? round\b", "regenerated", ("made anew",)),
    Text(r"\baims?\b", "target", ("the aim is 2 ms",), fine=("aimed",)),
    Text(r"(?:^|[.!:] +|\n *)(What|Whatever|Those (that|who|which|of|in|with)|Whether)\b"
         r"(?![^.!?]*\?)", "a noun first", ("What it holds is read.", "Those of b differ."),
         fine=("What does it hold?", "Those rows are 0.")),
)  # fmt: skip


class Hit(NamedTuple):
    path: str
    line: int
    word: str
    use: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: use {self.use}"


def parts(name: str) -> list[str]:
    """The words of an identifier.

    >>> parts("_BlockSide_of")
    ['block', 'side', 'of']
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_").split("_")


@cache
def broken(name: str) -> tuple[Name, ...]:
    """The rules that an identifier breaks, in one place or another."""
    whole, apart = [name.strip("_").lower()], parts(name)
    return tuple(
        rule
        for rule in NAMES
        if any(re.fullmatch(rule.pattern, x) for x in (whole if rule.whole else apart))
    )


def named(name: str, path: str) -> Iterator[Name]:
    """The rules that an identifier breaks in its place."""
    return (rule for rule in broken(name) if path.startswith(rule.where))


def written(text: str, path: str) -> Iterator[tuple[Text, re.Match[str]]]:
    """The rules that a text breaks, each with the first match."""
    for rule in TEXTS:
        if path.startswith(rule.where) and (found := re.search(rule.pattern, text)):
            yield rule, found


def identifiers(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of everything that code names or uses."""
    for node in nodes:
        for field in FIELDS.intersection(node._fields):
            if isinstance(name := getattr(node, field), str):
                yield getattr(node, "lineno", 1), name.rpartition(".")[2]


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment.

    >>> [*comments('x = "#1"  # one')]
    [(1, 'one')]
    """
    for found in STRING_OR_COMMENT.finditer(source) if "#" in source else ():
        if found[0].startswith("#"):
            yield source.count("\n", 0, found.start()) + 1, found[0].lstrip("# ")


def prose(source: str, nodes: list[ast.AST], *, messages: bool = True) -> Iterator[tuple[int, str]]:
    """Line and text of every comment and docstring, and of every string with a space, such as a
    message; these are left out without `messages`."""
    yield from comments(source)
    documented = {id(statement.value) for node in nodes if isinstance(node, DOCUMENTED)
                  for statement in node.body[:1] if isinstance(statement, ast.Expr)}  # fmt: skip
    for node in nodes:
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and " " in text and (messages or id(node) in documented):
            yield getattr(node, "lineno", 1), text


def names_of_tests(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of every test."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name


def in_code(path: str, source: str) -> Iterator[Hit]:
    """Every hit in a Python file; `path` is relative to the repository."""
    nodes = [*ast.walk(ast.parse(source))]
    for line, name in (names_of_tests if path.startswith(COMPARED) else identifiers)(nodes):
        for rule in named(name, path):
            if (path, name) not in KEPT and name not in OF_OTHERS:
                yield Hit(path, line, name, rule.use)
    if path.startswith(COMPARED):
        return
    for line, text in prose(source, nodes, messages=not path.startswith(f"{TESTS}/")):
        yield from in_text(path, text, line)


def in_text(path: str, text: str, first: int = 1) -> Iterator[Hit]:
    """Every hit in a text that starts at a line of a file."""
    for rule, found in written(text, path):
        line = first + text.count("\n", 0, found.start())
        yield Hit(path, line, found[0].strip(), rule.use)


def hits(places: Sequence[str]) -> Iterator[Hit]:
    """Every hit in these files and folders of the repository."""
    for place in places:
        found = [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*.*"))
        for file in found:
            path = file.relative_to(ROOT).as_posix()
            if path.startswith(("jaxmha/converters/", *GENERATED)):
                continue
            if file.suffix == ".py":
                yield from in_code(path, file.read_text())
            elif file.suffix == ".md":
                for number, line in enumerate(file.read_text().splitlines(), 1):
                    yield from in_text(path, line, number)


def main(places: list[str]) -> int:
    found = sorted(set(hits(places or [*SHIPPED, *DOCUMENTS, TESTS, EXPERIMENTS])))
    if found:
        print(*found, sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
