"""Tests of checkpoint files. Importing the modules of hostile files registers their cases."""

from importlib import import_module
from pathlib import Path

for _file in sorted(Path(__file__).parent.glob("hostile*.py")):
    if _file.stem != "hostile_run":
        import_module(f"tests.checkpoint.{_file.stem}")
