"""Checkpoints larger than one machine: every process reads, and writes, what its devices hold."""

from jaxmha.converters.sharded.distributed import load_sharded, save_sharded

__all__ = ["load_sharded", "save_sharded"]
