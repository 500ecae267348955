"""Tests of checkpoint files. Importing the modules of hostile files registers their cases."""

from tests.checkpoint import hostile, hostile_composed

__all__ = ["hostile", "hostile_composed"]
