"""Files that must be refused, by format. Importing this registers every case."""

from importlib import import_module
from pathlib import Path

from tests.checkpoint.hostile.cases import CASES, SOUND, Case, case, files

__all__ = ["CASES", "SOUND", "Case", "case", "files"]

for _file in sorted(Path(__file__).parent.glob("[!_]*.py")):
    import_module(f"{__name__}.{_file.stem}")
