"""`%%distributed` and `%distributed` in a real kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nblaunch.launch.output.terminal_lines import without_colours
from tests.conftest import eventually
from tests.kernel.harness import Kernel


# ------------------------------------------------------------------ names
def test_a_cell_runs_on_every_rank_and_knows_its_place(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed -n 2 -o places\n(rank, world_size, local_rank, str(device))").check()

    assert cell.value == "(0, 2, 0, 'cpu')"
    assert kernel.ask("list(places)") == [(0, 2, 0, "cpu"), (1, 2, 1, "cpu")]


def test_the_notebooks_names_are_in_scope(kernel: Kernel) -> None:
    kernel.run("base = 5\nclass Adder:\n    def add(self, n): return base + n\nadd = lambda n: Adder().add(n)").check()

    assert kernel.run("%%distributed -n 2\n[add(n) for n in (1, 2)]").check().value == "[6, 7]"


def test_shipped_functions_see_a_global_that_the_cell_reassigns(kernel: Kernel) -> None:
    kernel.run("scale = 1\ndef scaled(n): return scale * n").check()

    kernel.run("%%distributed -n 2 -o products\nscale = 10 + rank\nscaled(2)").check()

    assert kernel.ask("list(products), scale") == ([20, 22], 1)


def test_names_that_the_cell_assigns_stay_in_the_ranks(kernel: Kernel) -> None:
    kernel.run("%%distributed -n 2\nfresh = rank\ndef helper(): return fresh\nhelper()").check()

    assert kernel.ask("[name for name in ('fresh', 'helper', 'rank', 'world_size') if name in globals()]") == []


def test_a_name_that_is_nowhere_is_a_name_error(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed -n 2\nx = 1\nno_such_name")

    assert cell.error == "NameError: name 'no_such_name' is not defined"
    assert f"Cell In[{cell.reply['execution_count']}], line 3" in cell.traceback


# ------------------------------------------------------------------ values
def test_every_ranks_value_is_shown_once(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed -n 3\nimport math\nmath.sqrt(16 + 9 * rank)").check()
    assert sorted(cell.stdout.splitlines()) == ["[rank 1] 5.0", "[rank 2] 5.830951894845301"]
    assert cell.value == "4.0"

    silent = kernel.run("%%distributed -n 2\nrank;  # said by none").check()
    assert (silent.stdout, silent.value) == ("", "")
    assert kernel.run("%%distributed -n 2 -o bound\nrank").check().stdout == ""
    assert kernel.run("%%distributed -n 2\nNone if rank else 1").check().stdout == ""
    assert kernel.run("%%distributed -n 2 -o nothing\nx = 1").check().value == ""
    assert kernel.ask("list(nothing)") == [None, None]


def test_large_data_is_noted_once(kernel: Kernel) -> None:
    kernel.run("import torch\nfrom nblaunch.launch import result as launches\ndata = torch.ones(1_000_000)").check()
    kernel.run("noted, launches.NOTED_BYTES = launches.NOTED_BYTES, 1_000_000").check()
    said = [kernel.run("%%distributed -n 2\nfloat(data[0])").check().text for _ in range(2)]
    kernel.run("launches.NOTED_BYTES = noted").check()
    assert "nblaunch: sending 4 MB to the ranks, which share one copy: data 4 MB" in said[0]
    assert "sending" not in said[1]


def test_other_ranks_than_those_named_return_none(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed -n 3 --ranks 1,2 -o some\nrank").check()

    assert cell.value == "1"
    assert kernel.ask("list(some)") == [None, 1, 2]


def test_a_background_cell_returns_at_once_and_gives_a_launch(kernel: Kernel, folder: Path) -> None:
    source = "import time\nwhile not (folder / 'go').exists(): time.sleep(0.02)\nrank"
    assert kernel.run(f"%%distributed -n 2 --background -o job\n{source}").check().value == ""
    assert kernel.ask("repr(job).split()[0], job.done") == ("<Launch", False)

    (folder / "go").touch()

    assert kernel.ask("list(job.result())") == [0, 1]


def test_the_start_method_can_be_chosen(kernel: Kernel) -> None:
    options = "-n 1 --start-method forkserver --device cpu --backend gloo --threads-per-rank 1"
    assert kernel.run(f"%%distributed {options}\nimport torch\ntorch.get_num_threads()").check().value == "1"


# ------------------------------------------------------------------ help
def test_the_question_mark_explains_the_magic(kernel: Kernel) -> None:
    text = kernel.run("%%distributed?").reply["payload"][0]["data"]["text/plain"]
    first_screen = "\n".join(text.splitlines()[:24])

    for said in (
        "Run the cell on every rank",
        "%%distributed -n 2 -o sums",
        "-n N",
        "-o NAME",
        "--timeout",
        "--background",
    ):
        assert said in first_screen
    assert "--ranks" in text
    commands = kernel.run("%distributed?").reply["payload"][0]["data"]["text/plain"]
    assert "%distributed session -n 2 -o s" in commands
    assert "--ranks" not in commands


@pytest.mark.parametrize(
    ("code", "offered"),
    [
        ("%%distributed --ba", ["--background", "--backend"]),
        ("%%distributed -n 2 --device c", ["cpu", "cuda"]),
        ("%%distributed --start-method ", ["auto", "forkserver", "spawn", "fork"]),
        ("%distributed st", ["stacks", "status", "stop"]),
        ("%distributed session restart --", ["--keep", "--name", "--rank", "--session"]),
        ("%distributed pre", ["preload"]),
        ("%distributed session ", ["regroup", "restart", "status", "stop"]),
        ("%distributed session --idle", ["--idle-timeout"]),
    ],
)
def test_tab_completes_options_and_their_values(kernel: Kernel, code: str, offered: list[str]) -> None:
    assert sorted(kernel.complete(code)) == sorted(offered)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("%distributed preload", "the following arguments are required: NAME"),
        (
            "%distributed preload no_such_package",
            "%distributed preload 'no_such_package': no such module is installed",
        ),
        ("%distributed status recorder", "unrecognized arguments: recorder; usage: %distributed status"),
        ("%distributed -n 4 status", "to run a cell, write %%distributed in its first line"),
        ("%distributed status --background", "usage: %distributed st"),
        ("--sbatch", "--sbatch requires --export, as in --export train.py"),
        ("--force", "--force requires --export, as in --export train.py"),
        (
            r"--metric 'loss: ([\d.]+)'",
            r"--metric 'loss: ([\d.]+)': name the group that holds the number, as in (?P<loss>[\d.]+)",
        ),
        (
            r"--metric '(?P<x>\d+'",
            r"--metric '(?P<x>\d+': not a regular expression: missing ), unterminated subpattern",
        ),
        (
            r"--metric 'epoch (?P<step>\d+)'",
            r"--metric 'epoch (?P<step>\d+)': name the group that holds the number, as in (?P<loss>[\d.]+)",
        ),
        ("--metric ''", "--metric '': name the group that holds the number"),
        ("--metric -n 2", "argument --metric: expected one argument"),
        (r"--metric 'loss: (?P<loss>.)", r"%%distributed --metric 'loss: (?P<loss>.): unclosed quote"),
        ("-o 'x", "%%distributed -o 'x: unclosed quote"),
        ("-n 0", "--num-processes 0: must be an integer, at least 1"),
        ("-n two", "argument -n/--num-processes: invalid int value: 'two'"),
        ("-n 2 -o 1x", "argument -o/--output: 1x: must be a valid Python name"),
        ("-n 2 -o class", "argument -o/--output: class: must be a valid Python name"),
        ("-n 2 --ranks a,b", "argument --ranks: a,b: must be comma-separated ranks, as in 0,2"),
        ("-n 2 --ranks 0,2", "--ranks 0,2: the ranks are 0 and 1"),
        ("-n 2 --ranks -1", "--ranks -1: the ranks are 0 and 1"),
        ("-n 2 --device tpu", "--device 'tpu': must be one of 'auto', 'cpu', 'cuda'"),
        ("-n 2 --device cuda", "--device 'cuda', but no GPU is visible"),
        ("-n 2 --device cuda", "use --device 'cpu'"),
        ("--engine 'ssh --hostfile'", "--engine 'ssh --hostfile': --hostfile needs a value"),
        (
            "--engine ssh gpu1 gpu2 -n 2",
            'unrecognized arguments: gpu1 gpu2; quote the engine and its options: --engine "ssh gpu1 gpu2"',
        ),
        ("--engine slurm --time=60", 'quote the engine and its options: --engine "slurm --time=60"'),
        ("--engine slurm --partition=gpu", 'quote the engine and its options: --engine "slurm --partition=gpu"'),
        ("--engine ssh -F config gpu1", 'quote the engine and its options: --engine "ssh -F config gpu1"'),
        (
            "--engine 'ssh gpu1,gpu2'",
            "--engine 'ssh gpu1,gpu2': separate hosts by spaces, as in --engine 'ssh gpu1 gpu2'",
        ),
        ("--nodes 2", "--nodes 2: --engine 'auto' uses only this machine; choose another engine"),
        ("-n 2 --no-such-option", "unrecognized arguments: --no-such-option"),
        ("-n 2 --metrics 'x'", "unrecognized arguments: --metrics=x: did you mean --metric?"),
        ("--nproc_per_node 2", "unrecognized arguments: --nproc_per_node 2: did you mean -n?"),
        ("status", "%%distributed status: to run this command, write %distributed status with one %"),
    ],
)
def test_misuse_is_a_usage_error_that_says_the_fix(kernel: Kernel, line: str, fix: str) -> None:
    cell = kernel.run(line if line.startswith("%") else f"%%distributed {line}\nprint('ran')")

    assert cell.stderr.startswith("UsageError: ")
    assert fix in cell.stderr
    assert cell.stdout == ""


def test_a_line_magic_without_an_action_says_what_to_write(kernel: Kernel) -> None:
    said = kernel.run("%distributed").stderr
    assert (
        "%distributed: expected one of status, stacks, profile, stop, release, clear-cache, preload, session, who,"
        in said
    )
    shown = kernel.run("%distributed help").check().text
    assert "Run the cell on every rank" in shown
    assert "%distributed debug [--name NAME] [--rank RANK] Debug a background launch" in " ".join(shown.split())


def test_a_module_that_the_magic_names_is_there_before_the_ranks(kernel: Kernel) -> None:
    assert kernel.run("%distributed preload colorsys").check().value == ""
    kernel.run("from nblaunch.engines.fork_servers import servers\nimport time").check()
    kernel.run("while servers._builder is not None: time.sleep(0.05)").check()
    assert "with colorsys imported: pid" in kernel.run("%distributed status").check().stdout
    kernel.run("%%distributed -n 2 -o there\nimport sys\n'colorsys' in sys.modules").check()
    assert kernel.ask("list(there)") == [True, True]


def test_await_works_at_the_top_of_a_cell(kernel: Kernel) -> None:
    source = "import asyncio\nasync def double(n): return 2 * n\nx = await double(rank + 1)\nawait double(x)"
    kernel.run(f"%%distributed -n 2 -o doubled\n{source}").check()

    assert kernel.ask("list(doubled)") == [4, 8]


def test_an_error_after_await_is_shown_at_its_line_without_asyncio(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed -n 2\nimport asyncio\nawait asyncio.sleep(0)\n1/0")

    assert cell.error == "ZeroDivisionError: division by zero"
    assert f"Cell In[{cell.reply['execution_count']}], line 4" in cell.traceback
    assert "asyncio/" not in cell.traceback


def test_a_syntax_error_is_shown_at_its_line(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed -n 2\nx = 1\nif x\n    pass")

    assert cell.error.startswith("SyntaxError: expected ':'")
    assert without_colours(cell.traceback) == (
        f"  Cell In[{cell.reply['execution_count']}], line 3\n    if x\n        ^\nSyntaxError: expected ':'\n"
    )


# ------------------------------------------------------------------ notebook syntax in a rank
@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("!echo sum is $((1+1)) on {rank}", ["[rank 0] sum is 2 on 0", "[rank 1] sum is 2 on 1"]),
        ("lines = !printf 'a\\nb\\n'\nprint(lines)", ["[rank 0] ['a', 'b']"]),
        ("%time sum(range(10))", ["[rank 0] CPU times: ", "[rank 1] CPU times: "]),
        ("%timeit -n 2 -r 2 rank", ["[rank 0] ", "2 loops each)"]),
        ("display({'rank': rank})", ["[rank 0] {'rank': 0}", "[rank 1] {'rank': 1}"]),
        ("from IPython.display import display as show\nshow(rank + 5)", ["[rank 0] 5", "[rank 1] 6"]),
        ("%load_ext autoreload\n%autoreload 2\n%matplotlib inline\nprint('fine')", ["[rank 1] fine"]),
        ("%cd /\n%pwd", ["[rank 1] /"]),
        ("len?", ["[rank 1] ", "Return the number of items in a container."]),
        ("%%bash\necho from bash", ["[rank 0] from bash", "[rank 1] from bash"]),
        ("%%time\nx = rank + 7\nprint(x)", ["[rank 1] 8", "[rank 1] Wall time: "]),
        ("type(get_ipython()).__mro__[1].__name__ == 'InteractiveShell' and print('yes')", ["[rank 1] yes"]),
    ],
)
def test_notebook_syntax_works_in_a_rank(kernel: Kernel, body: str, shown: list[str]) -> None:
    cell = kernel.run(f"%%distributed -n 2\n{body}").check()

    for text in shown:
        assert text in cell.stdout


def test_a_fork_of_the_kernel_has_a_shell_of_its_own(kernel: Kernel) -> None:
    kernel.run("import warnings, matplotlib.pyplot as plt\nwarnings.simplefilter('ignore')").check()
    body = (
        "from IPython import get_ipython as ours\nfrom IPython.display import display as show\nshow(f'shown {rank}')\n"
        "!echo {rank} echoed\nimport matplotlib\n"
        "type(get_ipython()).__name__, ours() is get_ipython(), matplotlib.get_backend()"
    )
    cell = kernel.run(f"%%distributed -n 1 -o shells --start-method fork\n{body}").check()

    backend = "module://nblaunch.ranks.matplotlib_backend"
    assert kernel.ask("list(shells)") == [("RankShell", True, backend)]
    assert "[rank 0] 'shown 0'" in cell.stdout
    assert "[rank 0] 0 echoed" in cell.stdout
    assert not [message for message in cell.messages if message["msg_type"] == "display_data"]


def test_each_figure_has_a_file_of_its_own(kernel: Kernel) -> None:
    """After each plt.show() matplotlib numbers them from 1 again."""
    show = "plt.plot([1, 2])\nplt.show()\n"
    cell = kernel.run(f"%%distributed -n 2\nimport matplotlib.pyplot as plt\n{show}{show}").check()

    paths = re.findall(r"<Figure size .+>: (.+\.png)", cell.stdout)
    assert len(set(paths)) == len(paths) == 4
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.parametrize(
    ("body", "substitute"),
    [
        ("%pip install x", "%pip cannot run in a rank: run it in a cell of the notebook"),
        ("%%javascript\nalert(1)", "%%javascript cannot run in a rank: run it in a cell of the notebook"),
    ],
)
def test_unsupported_use_names_the_alternative(kernel: Kernel, body: str, substitute: str) -> None:
    assert substitute in kernel.run(f"%%distributed -n 2\n{body}").error


# ------------------------------------------------------------------ what runs
def test_status_lists_launches_and_stop_ends_them(kernel: Kernel) -> None:
    kernel.run("%%distributed -n 2 --background -o job\nimport time\ntime.sleep(600)").check()

    status = kernel.run("%distributed status").check().stdout
    assert re.search(r"<Launch .* of Cell In\[\d+\]: 2 ranks, running for \d+ s>", status)
    assert re.search(r"fork server: pid \d+, \d+ launch(es)?, ready after", status)

    assert kernel.run("%distributed stop").check().stdout == "stopped 1 launch\n"
    assert kernel.ask("job.done")
    assert "Launch" not in kernel.run("%distributed status").check().stdout
    assert kernel.run("%distributed stop").check().stdout == "stopped 0 launches\n"


def test_an_interrupt_while_stop_waits_kills(kernel: Kernel, folder: Path) -> None:
    body = (
        "import time\ntry:\n    (folder / f'running{rank}').touch()\n    time.sleep(600)\n"
        "finally:\n    (folder / f'stopping{rank}').touch()\n    time.sleep(99)"
    )
    kernel.run(f"%%distributed -n 2 --background -o stubborn\n{body}").check()
    eventually(lambda: len([*folder.glob("running*")]) == 2)
    request = kernel.start_cell("%distributed stop")
    eventually(lambda: len([*folder.glob("stopping*")]) == 2)

    kernel.interrupt()

    cell = kernel.finish_cell(request, 15.0).check()
    assert cell.stdout == "stopped 1 launch\n"
    assert kernel.ask("stubborn.done")
