"""The text of a NamedTuple of arrays, even if its arrays were donated."""

from typing import Protocol

from jaxmha.arrays import brief_array
from jaxmha.integers import is_donated


class Record(Protocol):
    """Interface of a NamedTuple."""

    def _asdict(self) -> dict[str, object]: ...


def record_repr(record: Record) -> str:
    """The `repr` of a NamedTuple, in which donated arrays are shown by dtype and shape.

    JAX raises for their values, and a debugger could not show a cache after its step."""
    shown = (
        f"{name}={f'<donated {brief_array(x)}>' if is_donated(x) else repr(x)}"
        for name, x in record._asdict().items()
    )
    return f"{type(record).__name__}({', '.join(shown)})"
