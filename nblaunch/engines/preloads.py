"""The modules that fork servers import ahead of launches."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nblaunch.machine.packages import KNOWN_SAFE, imported_here, package_of, why_not_ahead


class Preloads:
    """Modules that the user has named, or the notebook has imported; without packages that cannot be imported ahead."""

    def __init__(self) -> None:
        self._named: dict[str, None] = {}
        self._left_out: dict[str, str] = {}
        """Packages that cannot be imported ahead, and why."""

    def add(self, modules: Sequence[str], *, again: bool) -> None:
        """Add modules that the user names.

        Args:
            modules: Their names.
            again: Retry those that were left out.
        """
        self._named.update(dict.fromkeys(modules))
        for name in modules if again else ():
            self._left_out.pop(package_of(name), None)

    def leave_out(self, package: str, reason: str) -> None:
        """Import this package no more."""
        self._left_out[package] = reason

    def retry(self) -> None:
        """Retry every package: the installation has changed."""
        self._left_out.clear()

    def wanted(self) -> list[str]:
        """Return the modules to import."""
        packages = set(map(package_of, self._named))
        if os.environ.get("NBLAUNCH_PRELOAD") != "0":
            packages |= KNOWN_SAFE
        here = imported_here(packages)
        for package in {package_of(name) for name in (*here, *self._named)} - self._left_out.keys():
            if reason := why_not_ahead(package):
                self._left_out[package] = reason
        return self.allowed([*here, *(name for name in self._named if name not in here)])

    def allowed(self, modules: Sequence[str]) -> list[str]:
        """Return those of `modules` that are not left out."""
        return [name for name in modules if package_of(name) not in self._left_out]

    def status(self) -> list[str]:
        """Return lines for ``%distributed status``."""
        return [f"not imported ahead of launches: {name}, as {why}" for name, why in self._left_out.items()]
