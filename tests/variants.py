"""Which variants of a parametrised test every run takes; `make test-slow` takes the others too.

@pytest.mark.slow_variants("*bfloat16", "!plain-*")  # the last glob that fits an id decides
@pytest.mark.everyday(case=["plain", "everything"])  # with any other case it is slow
"""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import groupby
from typing import NamedTuple

import pytest


class Marks(NamedTuple):
    """The marks of a test function, which its variants share."""

    globs: list[str]
    everyday: list[tuple[str, Iterable[object]]]

    def slow(self, item: pytest.Function) -> bool:
        """A variant that every run does without."""
        fitting = [glob for glob in self.globs if _fits(item, glob)]
        return bool(fitting and not fitting[-1].startswith("!")) or any(
            _name_in(item, parameter) not in names for parameter, names in self.everyday
        )

    def unused(self, items: list[pytest.Function]) -> Iterator[str]:
        """Names that no variant has."""
        yield from (glob for glob in self.globs if not any(_fits(item, glob) for item in items))
        for parameter, names in self.everyday:
            known = [_name_in(item, parameter) for item in items]
            yield from (f"{parameter}={name}" for name in names if name not in known)


def name_of(value: object) -> object:
    """A case is called by its name, another value by itself."""
    return getattr(value, "name", value)


def by_function(items: Iterable[pytest.Function]) -> Iterator[tuple[Marks, list[pytest.Function]]]:
    """Test functions with marks, and their variants."""
    for _, group in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        variants = list(group)
        first = variants[0]
        marks = Marks(
            [glob for mark in first.iter_markers("slow_variants") for glob in mark.args],
            [pair for mark in first.iter_markers("everyday") for pair in mark.kwargs.items()],
        )
        if any(marks):
            yield marks, variants


def slow_and_unused(items: Iterable[pytest.Function]) -> tuple[list[pytest.Function], list[str]]:
    """Variants that are slow; names in marks that fit none: a test was renamed, or a case went."""
    slow, unused = [], []
    for marks, variants in by_function(items):
        slow += [item for item in variants if marks.slow(item)]
        function = variants[0].nodeid.partition("[")[0]
        unused += [f"{function}: {name!r} fits no variant" for name in marks.unused(variants)]
    return slow, unused


def _name_in(item: pytest.Function, parameter: str) -> object:
    return name_of(item.callspec.params[parameter])


def _fits(item: pytest.Function, glob: str) -> bool:
    return fnmatchcase(item.callspec.id, glob.removeprefix("!"))
