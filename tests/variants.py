"""Which variants of a parametrised test every run takes; `make test-slow` takes the others too.

@pytest.mark.slow_variants("*bfloat16", "!plain-*")  # the last glob that fits an id decides
@pytest.mark.everyday(case=["plain", "everything"])  # with any other case it is slow
"""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

import pytest


def name_of(value: object) -> object:
    """A case is called by its name, another value by itself."""
    return getattr(value, "name", value)


def is_slow(item: pytest.Function) -> bool:
    globs = [glob for mark in item.iter_markers("slow_variants") for glob in mark.args]
    fitting = [glob for glob in globs if _fits(item, glob)]
    everyday = [pair for mark in item.iter_markers("everyday") for pair in mark.kwargs.items()]
    return bool(fitting and not fitting[-1].startswith("!")) or any(
        name_of(item.callspec.params[parameter]) not in names for parameter, names in everyday
    )


def unused(items: Iterable[pytest.Function]) -> Iterator[str]:
    """Names in marks that no variant has: a test was renamed, or a case went."""
    used: dict[tuple[str, str], bool] = {}
    for item in items:
        fits = {
            glob: _fits(item, glob)
            for mark in item.iter_markers("slow_variants")
            for glob in mark.args
        }
        for mark in item.iter_markers("everyday"):
            for parameter, names in mark.kwargs.items():
                value = name_of(item.callspec.params[parameter])
                fits |= {f"{parameter}={name}": name == value for name in names}
        function = item.nodeid.partition("[")[0]
        for name, fit in fits.items():
            used[function, name] = used.get((function, name), False) or fit
    return (
        f"{function}: {name!r} fits no variant" for (function, name), fit in used.items() if not fit
    )


def _fits(item: pytest.Function, glob: str) -> bool:
    return fnmatchcase(item.callspec.id, glob.removeprefix("!"))
