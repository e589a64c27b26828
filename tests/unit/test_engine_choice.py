"""Which engine a launch gets: the words after ``engine=``, and what is wrong with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nblaunch.engines import current
from nblaunch.engines.slurm import SlurmStarter
from nblaunch.engines.ssh import SshStarter
from nblaunch.errors import ArgumentError


@pytest.fixture(autouse=True)
def _no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("engine", "num_nodes", "says"),
    [
        ("", None, "engine='': must be one of 'auto', 'local', 'slurm', 'ray', 'ssh'"),
        (None, None, "engine=None: must be one of"),
        ("slrum", None, "engine='slrum': must begin with one of"),
        ("slurm 'x", None, 'engine="slurm \'x": No closing quotation'),
        ("local -N2", None, "engine='local -N2': 'local' takes no options"),
        ("local", 2, "num_nodes=2: engine='local' uses only this machine"),
        ("auto", 2, "num_nodes=2: engine='auto' uses only this machine; choose another engine"),
        ("auto", 0, "num_nodes=0: must be an integer, at least 1"),
        ("slurm --nodes=2", None, "engine='slurm --nodes=2': --nodes: use num_nodes= (--nodes)"),
        ("slurm -n4", None, "engine='slurm -n4': -n4: nblaunch sets it"),
        ("ssh", None, "engine='ssh': name the hosts"),
        ("ssh --hostfile", None, "engine='ssh --hostfile': --hostfile needs a value"),
        ("ssh --hostfile /none", None, "engine='ssh --hostfile /none': No such file"),
        ("ssh gpu1 -p", None, "engine='ssh gpu1 -p': -p needs a value"),
        ("ssh gpu1,gpu2", None, "engine='ssh gpu1,gpu2': separate hosts by spaces, as in engine='ssh gpu1 gpu2'"),
        ("ssh a b", 3, "num_nodes=3, but engine='ssh …' names 2 hosts"),
    ],
)
def test_a_wrong_engine_is_named(engine: object, num_nodes: object, says: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(says)}"):
        current.chosen(engine, num_nodes)


def test_without_words_it_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current.chosen() is current.chosen("local", 1) is current.chosen("auto", 1) is current.engine
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert current.chosen("auto", 1) is current.engine


def test_the_same_words_are_the_same_engine() -> None:
    assert current.chosen("ssh a  b") is current.chosen("ssh a b")
    assert current.chosen("ssh a b", 1) is not current.chosen("ssh a b")
    assert current.release() == []


def test_ssh_takes_hosts_and_options(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("c slots=4  # the third\n# none\n\nd\n")
    starter = SshStarter(["-F", "config", "a", "-v", "b", "--hostfile", str(tmp_path / "hosts")])
    assert (starter.name, starter.count) == ("ssh a b c d", 4)
    assert SshStarter(["a", "b"], 1).name == "ssh a"
    assert SshStarter(["-v", "-F", "config", "-oCiphers=x,y", "-J", "c,d", "-p22", "a", "-4A"]).name == "ssh a"


def test_slurm_counts_the_nodes_of_its_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SlurmStarter([]).count == 1
    assert SlurmStarter(["--partition=gpu"], 3).count == 3
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert (SlurmStarter([]).count, SlurmStarter([]).name) == (2, "slurm job 7")
    assert SlurmStarter(["--jobid=8"]).count == 1
    with pytest.raises(ArgumentError, match=r"^num_nodes=3, but the notebook's job 7 has 2"):
        SlurmStarter([], 3)
