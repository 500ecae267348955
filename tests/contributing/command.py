"""A toy command."""

from pathlib import Path

from jaxmha import checkpoint
from jaxmha.cli.console import one_message, out

EXAMPLES = "Examples:\n\n  jaxmha toy model.safetensors"


def command(file: Path) -> None:
    """Count the tensors of a checkpoint."""
    with one_message(), checkpoint.open(file) as opened:
        out.print(f"{len(opened)} tensors")
