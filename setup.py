"""The native part of the build: the CPU ops, compiled by pd_kernels.build. All else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "kernels"))

from pd_kernels import build as pd_build


class BuildCpuOps(build_ext):
    """Puts the libraries into the package: in place for an editable install, else into the wheel."""

    def run(self) -> None:
        package = Path("kernels/pd_kernels") if self.inplace else Path(self.build_lib) / "pd_kernels"
        pd_build.build(package / pd_build.LIBRARIES)

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "pd_kernels"
        return [str(path) for path in (package / pd_build.LIBRARIES).glob("*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BinaryDistribution(Distribution):
    """A wheel for one platform, for it holds compiled libraries."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=BinaryDistribution,
    ext_modules=[Extension("pd_kernels.cpu_ops", sources=[])],  # stands for the libraries: no Python module
    cmdclass={"build_ext": BuildCpuOps},
)
