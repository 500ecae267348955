"""Counts the functions of each room whose signature has a bare `Any`: `python -m tests.any_share`.

A bare `Any` is the whole annotation of a parameter or of the return, also in a union (`Any | None`);
`Mapping[str, Any]` is not bare. Overloads and nested functions count.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("jaxmha", "converters")


def is_bare(annotation: ast.expr | None) -> bool:
    """True if an annotation is `Any`, or a union with `Any`.

    >>> [is_bare(ast.parse(text, mode="eval").body) for text in ("Any", "Any | None", "list[Any]")]
    [True, True, False]
    """
    if isinstance(annotation, ast.BinOp):
        return is_bare(annotation.left) or is_bare(annotation.right)
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def defined(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions within a node; no expression has one, and most nodes are expressions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        if not isinstance(child, ast.expr):
            yield from defined(child)


def in_source(source: str) -> Iterator[tuple[str, bool]]:
    """Line and name of every function, and True if its signature has a bare `Any`."""
    for node in defined(ast.parse(source)):
        own = node.args
        given = [*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg]
        annotations = [arg.annotation for arg in given if arg is not None]
        yield f"{node.lineno} {node.name}", any(map(is_bare, [*annotations, node.returns]))


def functions(folder: Path) -> Iterator[tuple[str, bool]]:
    """As `in_source`, for every file of a folder."""
    for path in sorted(folder.rglob("*.py")):
        for place, has in in_source(path.read_text()):
            yield f"{path.relative_to(ROOT)}:{place}", has


def main(folders: list[str]) -> None:
    """Prints every function with a bare `Any`, and the share of each folder."""
    for folder in folders or list(ROOMS):
        found = list(functions(ROOT / folder))
        bare = [place for place, has in found if has]
        print(*bare, sep="\n")
        print(f"{folder}: {len(bare)} of {len(found)} functions, {len(bare) / len(found):.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
