"""The check of words finds what it should, and nothing else."""

import pytest

from tests import glossary
from tests.glossary import KEPT, NAMES, ROOT, TEXTS, Name, Text


def place(rule: Name | Text) -> str:
    """A file in which the rule holds."""
    start = rule.where[0]
    return start if start.endswith((".py", ".md")) else f"{start}x.py"


@pytest.mark.parametrize("rule", NAMES, ids=lambda rule: rule.pattern)
def test_names(rule: Name) -> None:
    for name in rule.avoid:
        assert rule in glossary.named(name, place(rule)), name
    for name in rule.fine:
        assert rule not in glossary.named(name, place(rule)), name


@pytest.mark.parametrize("rule", TEXTS, ids=lambda rule: rule.avoid[0])
def test_texts(rule: Text) -> None:
    for text in rule.avoid:
        assert rule in [found for found, _ in glossary.written(text, place(rule))], text
    for text in rule.fine:
        assert rule not in [found for found, _ in glossary.written(text, place(rule))], text


@pytest.mark.parametrize(
    "source",
    [
        "beside = 1",
        "f(beside=1)",
        "x.beside",
        "def beside(): ...",
        "class Beside: ...",
        "def f(beside): ...",
        "import a.beside",
        "f'{beside}'",
        "# the file beside it",
        'raise ValueError("the file beside it")',
        "raise ValueError(f'{x} is beside it')",
        '"""A file.\n\nAnd one beside it."""',
    ],
)
def test_every_place_of_a_word_is_read(source: str) -> None:
    (hit,) = glossary.in_code("jaxmha/x.py", source)
    assert hit.line == 1 + source.count("\n", 0, source.casefold().index("beside"))
    assert str(hit).startswith(f"jaxmha/x.py:{hit.line}: ")


def test_of_tests_identifiers_are_read_and_of_compared_models_their_tests() -> None:
    source = "answer = 1  # beside\nx = 'a file beside it'\n\n\ndef test_the_answer(): ...\n"
    for place, lines in (("tests", [1, 1, 5]), ("tests/zoo", [5])):
        hits = glossary.in_code(f"{place}/test_x.py", source)
        assert sorted(hit.line for hit in hits) == lines


def test_a_word_in_a_document_is_found() -> None:
    assert [hit.word for hit in glossary.in_text("docs/a.md", "one\nbeside two", 1)] == ["beside"]


def test_kept_names_are_in_use() -> None:
    for path, name in KEPT:
        assert name in (ROOT / path).read_text()
