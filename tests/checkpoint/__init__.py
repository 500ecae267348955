"""Tests of checkpoint files. Importing the modules of hostile files registers their cases."""

from tests.checkpoint import (
    hostile,
    hostile_composed,
    hostile_hdf5,
    hostile_json,
    hostile_pickle,
    hostile_zarr,
)

__all__ = [
    "hostile",
    "hostile_composed",
    "hostile_hdf5",
    "hostile_json",
    "hostile_pickle",
    "hostile_zarr",
]
