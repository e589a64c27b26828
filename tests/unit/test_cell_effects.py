"""Which imports and attributes of cells ranks repeat."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nblaunch.transfer import cell_effects
from nblaunch.transfer.cell_effects import attributes_set_in, import_here, imported_in, set_here

FILES = {
    "ownpkg/__init__.py": "class Learner: ...\ndef __getattr__(name):\n    {}[name]",
    "ownpkg/extra.py": "import ownpkg\nownpkg.Learner.extra = 1",
    "ownpatch.py": "import ownpkg\nownpkg.Learner.patched = 2",
    "ownbroken.py": "raise SystemExit('not here')",
}


@pytest.fixture
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    forget()


def forget() -> None:
    cell_effects._last.clear()
    for name in [name for name in sys.modules if name.startswith("own")]:
        del sys.modules[name]


@pytest.mark.usefixtures("_own_modules")
def test_what_cells_import_is_imported_in_their_order() -> None:
    cells = [
        "x = 1\nfrom ownpkg.extra import *",
        "try:\n    import absent\nexcept ImportError:\n    import ownpatch as patch",
        "import json, numpy.random\nimport pytest\ndef f():\n    import ownlater",
        "import no such syntax",
    ]
    import_here({"ownpkg.extra": True, "ownpatch": True})
    assert imported_in(cells) == {"ownpkg.extra": True, "ownpatch": True, "pytest": False}
    forget()
    import_here(imported_in(cells[:0]) | {"ownpkg.extra": True, "ownpatch": True, "absent.part": False})
    learner: Any = sys.modules["ownpkg"].Learner
    assert (learner.extra, learner.patched) == (1, 2)


@pytest.mark.usefixtures("_own_modules")
def test_an_installed_module_waits_for_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import_here({"ownpkg.extra": False})
    assert "ownpkg" not in sys.modules
    monkeypatch.setitem(sys.modules, "ownpkg", __import__("ownpkg"))
    import_here({"ownpkg.extra": False})
    assert "ownpkg.extra" in sys.modules


@pytest.mark.usefixtures("_own_modules")
def test_an_import_that_fails_is_reported_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    import_here({"ownbroken": True, "ownpatch": True})
    assert capsys.readouterr().err == (
        "nblaunch: this rank failed to import ownbroken as the notebook did: SystemExit: not here\n"
    )
    assert "ownpatch" in sys.modules


def placed(*cells: str) -> tuple[dict[Any, Any], Any]:
    """Run cells that have `own`, a module; return what is sent of their effects, and the module as ranks import it."""
    import_here({"ownpkg.extra": True})
    own: Any = sys.modules["ownpkg"]
    names: dict[str, Any] = {"own": own, "sys": sys, "__name__": "__main__"}
    for cell in cells:
        exec(cell, names)
    found = attributes_set_in([*cells, "no such syntax", "own.absent.x = 1; absent.y = 1"], names)
    del sys.modules["ownpkg"], sys.modules["ownpkg.extra"]
    import_here({"ownpkg": True})
    return found, sys.modules["ownpkg"]


@pytest.mark.usefixtures("_own_modules")
def test_what_cells_set_in_modules_is_set_again(capsys: pytest.CaptureFixture[str]) -> None:
    found, own = placed(
        "class Mine: pass\nL = own.Learner\nown.rate = 1\nown.Learner.size = 3\nL.added = staticmethod(len)",
        "if True:\n    own.rate, own.shape = 2, [3, 4]\nown.later = 4",
        "Mine.y = 2\nMine().x = 1\nown.stream = sys.stdout = sys.stdout\nimport os\nos.environ |= {}",
        "def f():\n    own.never = 5",
    )
    assert {place: value for place, value in found.items() if place[2] != "added"} == {
        ("ownpkg", "", "rate"): 2,
        ("ownpkg", "Learner", "size"): 3,
        ("ownpkg", "", "shape"): [3, 4],
        ("ownpkg", "", "later"): 4,
    }
    set_here({**found, ("ownpkg", "Absent", "x"): 1}, is_kept=True)
    assert (own.rate, own.Learner.size, own.Learner().added("abc"), own.shape, own.later) == (2, 3, 3, [3, 4], 4)
    assert "this rank failed to set ownpkg.Absent.x as the notebook did" in capsys.readouterr().err
    own.rate = own.later = 7  # in a session
    set_here({**found, ("ownpkg", "", "later"): 5}, is_kept=True)
    assert (own.rate, own.later) == (7, 5)


@pytest.mark.usefixtures("_own_modules")
def test_what_cells_take_back_is_not_set() -> None:
    taken_back = (
        "own.rate = 1\nown.Learner.kind = 1\nL = own.Learner; own.Learner = int",
        "del own.rate, L.kind\nown.Learner = L",
    )
    assert placed(*taken_back)[0] == {}


@pytest.mark.usefixtures("_own_modules")
def test_a_function_with_another_closure_is_another_one() -> None:
    import_here({"ownpkg": True})
    for number in 1, 2:
        set_here({("ownpkg", "", "f"): (lambda n: lambda: n)(number)}, is_kept=True)
        assert sys.modules["ownpkg"].f() == number
