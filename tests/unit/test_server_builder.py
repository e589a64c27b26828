"""Checks of the packages that a fork server's successor imports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nblaunch.machine.packages import package_of
from nblaunch.ranks import server_builder


def test_packages_are_listed_while_another_thread_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, object] = {"json": None, "json.decoder": None, "csv": None}

    def package_of_and_import(module: str) -> str:
        modules[f"late{len(modules)}"] = None
        return package_of(module)

    monkeypatch.setattr(server_builder, "sys", SimpleNamespace(modules=modules))
    monkeypatch.setattr(server_builder, "package_of", package_of_and_import)
    assert server_builder._packages() == {"json", "csv"}
