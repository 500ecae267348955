"""Published figures of accelerators, and the time that a step should take on them."""

from typing import NamedTuple

# Of the peak, what large products of matrices reach in practice.
EFFICIENCY = 0.6


class Machine(NamedTuple):
    """One accelerator and its links.

    Attributes:
      flops: per second, dense bfloat16.
      memory: bytes per second.
      room: bytes of memory.
      links: (devices, bytes per second that one of them sends in a ring) up to so many together.
      directions: of a ring, that share this speed.
      source: of the figures.
    """

    flops: float
    memory: float
    room: float
    links: tuple[tuple[float, float], ...]
    directions: int
    source: str

    def link(self, devices: int) -> float:
        """Bytes per second that a device sends in a ring of so many."""
        return next(speed for most, speed in self.links if devices <= most)


MACHINES = {
    "H200": Machine(
        989e12,
        4.8e12,
        141e9,
        ((8, 450e9), (float("inf"), 50e9)),
        1,
        "NVIDIA H200 data sheet: 141 GB; NVLink 900 GB/s both ways, through switches, within 8; one "
        "400 Gb/s port beyond",
    ),
    "TPU v5p": Machine(
        459e12,
        2.765e12,
        95 * 2**30,
        ((float("inf"), 200e9),),
        2,
        "Google Cloud TPU v5p documentation: 95 GiB; 1200 GB/s per chip both ways over the six links "
        "of a 3D torus, so 100 GB/s each way of one link",
    ),
}


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
