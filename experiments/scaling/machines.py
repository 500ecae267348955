"""Published figures of accelerators, and the time that a step should take on them."""

from typing import NamedTuple

# Of the peak, what large products of matrices reach in practice.
EFFICIENCY = 0.6


class Machine(NamedTuple):
    """One accelerator and its links.

    Attributes:
      flops: per second, dense bfloat16.
      memory: bytes per second.
      links: (devices, bytes per second each way of one of them) up to so many devices together.
      source: of the figures.
    """

    flops: float
    memory: float
    links: tuple[tuple[float, float], ...]
    source: str

    def link(self, devices: int) -> float:
        """Bytes per second each way between neighbours of so many devices."""
        return next(speed for most, speed in self.links if devices <= most)


MACHINES = {
    "H200": Machine(
        989e12,
        4.8e12,
        ((8, 450e9), (float("inf"), 50e9)),
        "NVIDIA H200 data sheet: NVLink 900 GB/s both ways within 8; one 400 Gb/s port beyond",
    ),
    "TPU v5p": Machine(
        459e12,
        2.765e12,
        ((float("inf"), 300e9),),
        "Google Cloud TPU v5p documentation: 4800 Gb/s per chip, both ways",
    ),
}


class Work(NamedTuple):
    """What one device does in a step of one layer: forward and backward.

    Attributes:
      flops, bytes: of products, and of operands and results that memory has to give and take.
      hidden: bytes sent while products run. exposed: bytes sent while they wait.
    """

    flops: float
    bytes: float
    hidden: float
    exposed: float


def seconds(work: Work, machine: Machine, devices: int) -> float:
    """The slowest of products, memory and hidden messages, and then the exposed ones.

    >>> round(seconds(Work(989e12 * 0.6, 0, 0, 450e9), MACHINES["H200"], 8), 6)
    2.0
    """
    link = machine.link(devices)
    busy = work.flops / (machine.flops * EFFICIENCY), work.bytes / machine.memory
    return max(*busy, work.hidden / link) + work.exposed / link
