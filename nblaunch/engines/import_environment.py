"""The environment and directory in which modules are imported, and which variables a fork server reads only once."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import NamedTuple

from nblaunch.machine.packages import ONE_THREAD, differs

_READ_AT_IMPORT = (
    "TORCH",
    "PYTORCH",
    "PYTHON",
    "LD_",
    "DYLD_",
    "MKL_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "MALLOC_",
    "GLIBC_TUNABLES",
    "NUMPY",
    "NPY_",
    "SYMPY_",
    "MPMATH_",
    "TRITON_",
)
"""Prefixes of variables that torch, its libraries and Python read once, when they are loaded."""
_SET_BY_LIBRARIES = (
    "KMP_DUPLICATE_LIB_OK",  # by scikit-learn and torchvision, with the next
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # by lightning
    "TORCHINDUCTOR_CACHE_DIR",  # by torch's compiler, with the next
    "TRITON_CACHE_DIR",
)
"""Variables that libraries set when the notebook imports them. They count only if ``env=`` names them."""


class Where(NamedTuple):
    """The environment and directory of an import."""

    env: Mapping[str, str]
    cwd: str
    named: Collection[str] = ()
    """The variables that ``env=`` has named."""

    @classmethod
    def here(cls) -> Where:
        """Return this process's environment, with the root as its directory."""
        return cls(dict(os.environ), os.path.abspath(os.sep))

    @property
    def read_at_import(self) -> dict[str, str]:
        """The variables that a server reads once. Launches with equal ones can share a server."""
        ignored = ("TORCHELASTIC_", *ONE_THREAD)  # set by another launch, or 1 in every server
        return {
            name: value
            for name, value in self.env.items()
            if name.startswith(_READ_AT_IMPORT) and not name.startswith(ignored) and not self._is_librarys(name)
        }

    def is_like(self, other: Where) -> bool:
        """Return True if modules imported here are valid for `other`."""
        return self.cwd == other.cwd and self._significant() == other._significant()

    def _significant(self) -> dict[str, str]:
        """Return the variables that packages may have read during their import."""
        return {name: value for name, value in self.env.items() if not differs(name) and not self._is_librarys(name)}

    def _is_librarys(self, name: str) -> bool:
        return name in _SET_BY_LIBRARIES and name not in self.named
