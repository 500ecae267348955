"""Parses the YAML of a model's settings, with PyYAML's safe loader: no objects, no aliases.

Source: https://yaml.org/spec/1.2.2/
"""

import re
from typing import TYPE_CHECKING, Any

from jaxmha.checkpoint.errors import MissingDependency
from jaxmha.checkpoint.limits import Budget

if TYPE_CHECKING:
    import yaml

_DEEPEST = 8
_MOST = 1 << 16  # most bytes; PyYAML scans a million per second, and settings have thousands
_NODE_BYTES = 2000  # memory of a node and its marks in the text, at most
# PyYAML follows YAML 1.1, in which 1e-5 is a string.
_FLOAT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


def load(raw: bytes, budget: Budget) -> dict[str, Any]:
    """Parses settings.

    Raises:
      ValueError: the text is no mapping of distinct keys, or has an alias, a tag of an object, or
        too many levels. BudgetExceeded: it is too long. MissingDependency: PyYAML is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        remedy = "pip install 'jaxmha[files]'"
        raise MissingDependency(budget.path, "settings in YAML need PyYAML", remedy) from error
    budget.spend("the size of its YAML", len(raw), _MOST)
    text = raw.decode()
    budget.build(4 * len(text), "its YAML")
    try:
        found = _loader(text, budget).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(found, dict):
        what = type(found).__name__
        raise ValueError(f"expected settings of the form `key: value`, got {what}")  # noqa: TRY004
    return found


def _loader(text: str, budget: Budget) -> "yaml.SafeLoader":
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Charges node memory; raises for anchors, aliases, deep nesting and duplicate keys."""

        depth = 0

        def compose_node(self, parent: object, index: object) -> object:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise ValueError(f"line {event.start_mark.line + 1} has an anchor or an alias")
            budget.build(_NODE_BYTES, "its YAML")
            self.depth += 1
            if self.depth > _DEEPEST:
                raise ValueError(f"settings are nested in more than {_DEEPEST} levels")
            node: object = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: "yaml.MappingNode", deep: bool = False) -> object:
            found: dict[object, object] = super().construct_mapping(node, deep=True)
            if len(found) != len(node.value):
                raise ValueError(f"line {node.start_mark.line + 1}: a key is there twice")
            return found

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))
    return Loader(text)
