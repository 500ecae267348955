"""Builds the library before the package is put together, and tags the wheel: it depends on the
platform, and on no version of Python."""

import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

sys.path.insert(0, str(Path(__file__).parent))
import build_library


class Platform(Distribution):
    """Has a library, though no extension module."""

    def has_ext_modules(self) -> bool:
        return True


class Wheel(bdist_wheel):
    """`py3-none-<platform>`."""

    def get_tag(self) -> tuple[str, str, str]:
        given = super().get_tag()[2] if self.plat_name_supplied else None
        return "py3", "none", given or f"linux_{build_library.machine()}"


def building(command: Any) -> Any:
    """A command that builds the library first."""

    class Building(command):
        def run(self) -> None:
            build_library.up_to_date()
            super().run()

    return Building


setup(
    distclass=Platform,
    cmdclass={
        "bdist_wheel": Wheel,
        "build_py": building(build_py),
        "editable_wheel": building(editable_wheel),
    },
)
