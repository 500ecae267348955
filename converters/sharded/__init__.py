"""Loads and saves checkpoints that are larger than the memory of one machine."""

from jaxmha.converters.sharded.distributed import load_sharded, save_sharded

__all__ = ["load_sharded", "save_sharded"]
