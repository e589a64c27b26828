"""When a run ended whose process has died: its folder has no event of that."""

from __future__ import annotations

import json
import os
from pathlib import Path

from nblaunch.launch import run_folders


def test_a_lost_run_ends_with_its_last_write_and_not_when_it_is_seen(tmp_path: Path) -> None:
    run_folders.write_facts(tmp_path, "id", "train", "")
    facts = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "rank0.out").write_text("step 1\n")
    for path in tmp_path.iterdir():
        os.utime(path, (facts["began"] + 60,) * 2)
    run_folders.mark_seen(tmp_path)
    os.utime(tmp_path / "seen", (facts["began"] + 3600,) * 2)

    run = run_folders.read(tmp_path)

    assert run is not None
    assert run.state == "lost"
    assert round(run.lost.seconds) == 60
