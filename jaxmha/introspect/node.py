"""One node of the graph of attention."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxmha.introspect.framework_differences import Difference

Kind = Literal["input", "product", "elementwise", "softmax", "joined"]


class Stored(NamedTuple):
    """A parameter array: its name in the framework, its axes and its shape."""

    name: str
    axes: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """One step of attention, as if it were a separate program.

    Attributes:
      name: name of the result.
      kind: `input`; `product` of matrices; `elementwise`; `softmax`; `joined` (concatenated).
      formula: formula of the result, in the names of other nodes and of parameters.
      axes: axes of the result, in jaxmha's axis letters; `S+1` has an extra key position.
      shape: shape of the result.
      dtype: dtype of the result.
      inputs: the nodes that it reads.
      parameters: the parameter arrays that it reads, as the framework stores them.
      cost: number of operations, as a formula. An addition, multiplication, division, comparison or
        exponential counts 1; selecting and copying count 0.
      flops: value of `cost`.
      bytes_read: bytes of inputs and parameters, each read once.
      bytes_written: bytes of the result.
      differences: how frameworks differ at this node.
    """

    name: str
    kind: Kind
    formula: str
    axes: str
    shape: tuple[int, ...]
    dtype: str
    inputs: tuple[str, ...]
    parameters: tuple[Stored, ...]
    cost: str
    flops: int
    bytes_read: int
    bytes_written: int
    differences: tuple[Difference, ...]

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
