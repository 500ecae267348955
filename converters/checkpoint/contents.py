"""What passes between a format and the rest: contents read, a plan to write."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxmha.converters.checkpoint.tensor import TensorInfo


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contents:
    """A file whose header was read and checked; `load` reads one tensor."""

    info: Mapping[str, TensorInfo]
    load: Callable[[str], np.ndarray]
    metadata: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    close: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Plan:
    """Tensors to write to `path`; sizes are known before any data is."""

    path: Path
    info: Mapping[str, TensorInfo]
    load: Callable[[str], np.ndarray]
