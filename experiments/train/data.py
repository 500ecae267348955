"""Functions of the Python standard library as bytes; the label is the package they come from."""

import ast
import sysconfig
import textwrap
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# In every supported Python, with a hundred functions or more each.
PACKAGES = (
    "asyncio", "email", "encodings", "http", "importlib",
    "logging", "multiprocessing", "unittest", "urllib", "xml",
)  # fmt: skip
SHORTEST = 32
HELD_OUT = 5  # one function of so many is not trained on


class Examples(NamedTuple):
    """Texts `n T` in bytes, 0 after their length; lengths and labels `n`."""

    texts: NDArray[np.uint8]
    lengths: NDArray[np.int32]
    labels: NDArray[np.int32]

    def take(self, rows: NDArray[np.intp] | slice) -> "Examples":
        """Some of them."""
        return Examples(self.texts[rows], self.lengths[rows], self.labels[rows])


def read(T: int) -> tuple[Examples, Examples]:
    """The training and the held-out examples: the first T bytes of every function.

    A hash of these bytes decides whether a function is held out.
    """
    found: dict[bytes, int] = {}
    for label, package in enumerate(PACKAGES):
        for text in functions(Path(sysconfig.get_path("stdlib")) / package):
            if len(text) >= SHORTEST:
                found.setdefault(text[:T], label)  # copies count once
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for text in sorted(found):
        sides[zlib.crc32(text) % HELD_OUT == 0].append(text)
    kept, held_out = (_examples(texts, [found[text] for text in texts], T) for texts in sides)
    return kept, held_out


def functions(folder: Path) -> Iterator[bytes]:
    """The source of every function and method below a folder, but for those inside functions."""
    for path in sorted(folder.rglob("*.py")):
        if "test" in path.parts or "tests" in path.parts:
            continue
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        with warnings.catch_warnings(action="ignore"):  # of strings with odd backslashes
            nodes: list[ast.AST] = [ast.parse(source)]
        while nodes:
            for node in getattr(nodes.pop(), "body", ()):
                if isinstance(node, ast.ClassDef):
                    nodes.append(node)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    body = "".join(lines[node.lineno - 1 : node.end_lineno])
                    yield textwrap.dedent(body).encode()


def batch(examples: Examples, size: int, seed: int, step: int) -> Examples:
    """The batch of a step, which depends on nothing else: every epoch is shuffled again."""
    epoch, place = divmod(step, len(examples.labels) // size)
    order = np.random.default_rng((seed, epoch)).permutation(len(examples.labels))
    return examples.take(order[place * size : (place + 1) * size])


def _examples(texts: list[bytes], labels: list[int], T: int) -> Examples:
    padded = np.zeros((len(texts), T), np.uint8)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return Examples(
        padded, np.array([len(text) for text in texts], np.int32), np.array(labels, np.int32)
    )
