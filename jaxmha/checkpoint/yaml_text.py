"""Parses the YAML of a model's settings: mappings, lists of scalars, and scalars, one a line.

It reads the form in which a dataclass is written, and no anchors, tags or flow collections other
than an empty list or mapping. Source: https://yaml.org/spec/1.2.2/
"""

import json
import re
from typing import Any

from jaxmha.checkpoint.limits import Budget

_LINE = re.compile(r"( *)(?:(- )?)(?:([A-Za-z_][\w.-]*):(?: |$))?(.*)")
_CONSTANTS: dict[str, Any] = {
    "": None, "null": None, "~": None, "true": True, "false": False, "[]": [], "{}": {},
}  # fmt: skip
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_DEEPEST = 8
_LINE_BYTES = 400  # memory of an entry, at most


def load(raw: bytes, budget: Budget) -> dict[str, Any]:
    """Parses settings.

    Raises:
      ValueError: the text is of another form. BudgetExceeded: it has too many lines.
    """
    text = raw.decode()
    budget.build(len(text) + _LINE_BYTES * (text.count("\n") + 1), "its YAML")
    root: dict[str, Any] = {}
    open_: list[tuple[int, Any, str]] = [(-1, root, "")]  # indent, container, key of the next child
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line in ("---", "..."):
            continue
        found = _LINE.fullmatch(line)
        assert found is not None
        indent, item, key, rest = len(found[1]), found[2], found[3], found[4].strip()
        problem = f"line {number} is no setting of the form `key: value`"
        while len(open_) > 1 and (indent < open_[-1][0] or (indent == open_[-1][0] and not item)):
            open_.pop()
        at, container, waiting = open_[-1]
        if item:
            if key is not None or not waiting:
                raise ValueError(problem)
            if container[waiting] is None:
                container[waiting] = []
            if not isinstance(container[waiting], list):
                raise ValueError(problem)
            container[waiting].append(_scalar(rest, problem))
            continue
        if key is None or len(open_) > _DEEPEST:
            raise ValueError(problem)
        if waiting and indent > at:
            if container[waiting] is not None and not isinstance(container[waiting], dict):
                raise ValueError(problem)
            container[waiting] = {} if container[waiting] is None else container[waiting]
            container = container[waiting]
        elif waiting:
            raise ValueError(problem)
        if key in container:
            raise ValueError(f"line {number} has the key {key} twice")
        container[key] = _scalar(rest, problem)
        open_.append((indent, container, key if not rest else ""))
    return root


def _scalar(text: str, problem: str) -> Any:
    if text.lower() in _CONSTANTS:
        found = _CONSTANTS[text.lower()]
        return type(found)() if isinstance(found, list | dict) else found
    if _NUMBER.fullmatch(text):
        return float(text) if re.search("[.eE]", text) else int(text)
    if text.startswith('"'):
        return json.loads(text)
    if text.startswith("'"):
        return text.strip("'").replace("''", "'")
    if text[0] in "[{&*!|>%@`":
        raise ValueError(problem)
    return text
