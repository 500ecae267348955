"""Plans that strangers made: refused in words, before they cost minutes or gigabytes."""

import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint import toml_text
from jaxmha.converters import matching
from jaxmha.converters.migrate import plan_toml
from tests import pace

PARSERS: dict[str, Callable[[str], object]] = {
    "plan": plan_toml.loads,
    "match": matching.Plan.from_toml,
}
LONG = ".".join("x" * 30_000)
# The check that refuses a text: another, which would see it later, does not show that this one does.
PARTS, DIGITS = "a key of more than 8 parts", "a number or a key of more than 1,000 characters"
TABLES, DEEP, MEMORY = "no tables but", "nested too deeply", "memory to build with its TOML"
LISTS = r"tables \[\[(array|module)\]\]"
# The hidden keys follow what looks like a comment or a string to a reader of single lines.
TEXTS = {
    "dotted_key": (PARTS, f"{LONG} = 1"),
    "dotted_header": (PARTS, f"[{LONG}]"),
    "dotted_key_after_a_string_of_lines": (PARTS, f'a = {{b = """\n# """, {LONG} = 1}}'),
    "dotted_key_after_literal_lines": (PARTS, f"a = {{b = '''\n\" ''', {LONG} = \"1\"}}"),
    "dotted_key_after_four_quotes": (PARTS, f'a = {{b = """\n\\""" """", {LONG} = 1}} # """'),
    "deep_lists": (DEEP, "a = " + "[" * 100_000),
    "deep_tables": (MEMORY, "a = " + "{a = " * 100_000),
    "digits": (DIGITS, "version = " + "9" * 5000),
    "digits_of_a_fraction": (DIGITS, "version = 1." + "9" * 900_000),
    "digits_of_base_16": (DIGITS, "version = 0x" + "f" * 900_000),
    "many_tables": (TABLES, "".join(f"[a{i}]\n" for i in range(100_000))),
    "many_lists_of_tables": (TABLES, "".join(f"[[a{i}]]\n" for i in range(100_000))),
    "many_quoted_tables": (TABLES, "".join(f'["{i}"]\n' for i in range(100_000))),
    "many_parts": (MEMORY, "".join(f"a{i}.b = 1\n" for i in range(100_000))),
    "many_lists": (MEMORY, "a = [" + "[]," * 600_000 + "]"),
    "many_inline_tables": (MEMORY, "a = [" + "{}," * 200_000 + "]"),
    "many_texts": (MEMORY, "a = [" + '"",' * 800_000 + "]"),
    "not_a_list": (LISTS, "version = 1\narray = 3\nmodule = 3"),
    "carriage_returns": (TABLES, "".join(f"[a{i}]\r\n" for i in range(10_000))),
}


# Both parse them by `toml_text`.
EVERYDAY = (
    "dotted_key", "dotted_key_after_a_string_of_lines", "dotted_key_after_literal_lines",
    "dotted_key_after_four_quotes", "deep_tables", "digits", "many_tables", "many_parts",
    "many_lists", "carriage_returns",
)  # fmt: skip


@pytest.mark.slow_variants(
    "*", *(f"!plan-{name}" for name in EVERYDAY), "!*-not_a_list", "!match-dotted_key"
)
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("parser", PARSERS)
def test_text_is_refused_at_once(name: str, parser: str) -> None:
    check, text = TEXTS[name]
    start = time.process_time()
    with pytest.raises(ValueError, match=check):
        PARSERS[parser](text)
    assert pace.within(time.process_time() - start, 2)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=check):
            PARSERS[parser](text)
        assert tracemalloc.get_traced_memory()[1] < (64 << 20) + 2 * len(text)
    finally:
        tracemalloc.stop()


def test_headers_may_have_spaces_and_comments() -> None:
    text = "version = 1 # [x]\r\n [ [ array ] ]\t# one\r\nto = 'a'\nfill = 'zeros'\n"
    with pytest.raises(ValueError, match="no TOML"):  # TOML has no space between brackets
        matching.Plan.from_toml(text)
    plan = matching.Plan.from_toml(text.replace("[ [", "[[").replace("] ]", "]]"))
    assert plan.lines == (matching.Line("a", fill="zeros"),)


def test_strings_may_hold_anything() -> None:
    quoted = '"""\n[x]\n' + "a." * 20 + '\n"""'
    assert toml_text.loads(f"a = {quoted}", []) == {"a": "[x]\n" + "a." * 20 + "\n"}
    assert toml_text.loads("a = '[x' # '[y]", []) == {"a": "[x"}


def test_plans_are_plain_files_of_some_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(checkpoint.UnreadableFile, match="FIFO"):
        toml_text.read(tmp_path / "fifo")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(checkpoint.BudgetExceeded, match="size of the plan"):
        toml_text.read(tmp_path / "large")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="no UTF-8"):
        toml_text.read(tmp_path / "bytes")
