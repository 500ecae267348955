"""Tests of checkpoint files. Importing the modules of hostile files registers their cases."""

from tests.checkpoint import hostile, hostile_composed, hostile_hdf5

__all__ = ["hostile", "hostile_composed", "hostile_hdf5"]
