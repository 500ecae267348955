"""Published figures of accelerators, and the time that a step should take on them."""

import tomllib
from pathlib import Path
from typing import NamedTuple

# Of the peak, what large products of matrices reach in practice.
EFFICIENCY = 0.6


class Machine(NamedTuple):
    """One accelerator and its links, as `machines.toml` has them."""

    flops: float
    memory: float
    room: float
    links: list[tuple[float, float]]
    directions: int
    source: str

    def link(self, devices: int) -> float:
        """Bytes per second that a device sends in a ring of so many."""
        return next(speed for most, speed in self.links if devices <= most)


TABLE = tomllib.loads(Path(__file__).with_name("machines.toml").read_text())
MACHINES = {name: Machine(**figures) for name, figures in TABLE.items()}


class Work(NamedTuple):
    """The work of one device in a step of one layer: forward and backward.

    Attributes:
      flops: floating-point operations of matrix products.
      bytes: bytes of their operands and results that are read from and written to memory.
      hidden: bytes sent while products run. exposed: bytes sent while products wait.
      moves: bytes sent around the ring in one direction, while products wait.
    """

    flops: float
    bytes: float
    hidden: float
    exposed: float
    moves: float = 0.0


def seconds(work: Work, machine: Machine, devices: int) -> float:
    """The slowest of products, memory and hidden messages, and then the messages that all wait for.

    >>> round(seconds(Work(989e12 * 0.6, 0, 0, 450e9), MACHINES["H200"], 8), 6)
    2.0
    """
    link = machine.link(devices)
    busy = work.flops / (machine.flops * EFFICIENCY), work.bytes / machine.memory
    waited = work.exposed + work.moves * machine.directions
    return max(*busy, work.hidden / link) + waited / link
