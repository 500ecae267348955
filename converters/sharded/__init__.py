"""Loads and saves checkpoints larger than one machine."""

from jaxmha.converters.sharded.distributed import load_sharded, save_sharded

__all__ = ["load_sharded", "save_sharded"]
