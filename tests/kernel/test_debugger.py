"""The debugger of ranks in a real kernel, with someone who types into the cell's input box."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.kernel.harness import Cell, Kernel

STOPS = """
import torch, time, sys
import torch.distributed as dist
def train(rank):
    x = torch.ones(2) * rank; dist.barrier()
    if rank == 1:
        breakpoint()
        y = x + 41
    dist.all_reduce(x)
    return x.tolist()
"""
RUN = "print(list(notebook_launcher(train, num_processes=2)))"
PROMPTS = ["(rank 0 of 2) ", "(rank 1 of 2) "]
GONE = "this prompt has ended: press Enter, nothing that you type here is used"


@pytest.fixture(autouse=True)
def _no_line_is_waited_for(kernel: Kernel) -> Iterator[None]:
    yield
    with pytest.raises(queue.Empty):
        kernel.client.get_stdin_msg(timeout=0.05)


def plain(cell: Cell) -> str:
    """Return what the cell has printed, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", cell.text)


# ------------------------------------------------------------------ breakpoint()
def test_one_rank_stops_and_the_others_wait(kernel: Kernel) -> None:
    cell = kernel.debug(STOPS + RUN, "p x", "w", "c").check()
    said = plain(cell)
    assert cell.prompts == [PROMPTS[1]] * 3
    assert re.search(r"rank 1 stopped at a breakpoint, Cell In\[\d+\], line 7\n", said)
    assert re.search(r"> Cell In\[\d+\]\(7\)train\(\)\n", said)
    assert "----> 7         y = x + 41" in said
    assert "tensor([1., 1.])\n" in said
    assert "worker.py" not in said
    assert said.endswith("[[1.0, 1.0], [1.0, 1.0]]\n")


def test_assignments_survive_what_reads_the_names(kernel: Kernel) -> None:
    body = "%%distributed -n 1\ndef f():\n    x = 1\n    breakpoint()\n    return x\nf()"
    request = kernel.start_cell(body)
    kernel.type(request, "!x = 5", "p x", "x?", "!x += 0", "c")
    assert kernel.finish_cell(request).check().value == "5"


def test_the_rest_of_a_statement_is_asked_for_and_help_is_shown(kernel: Kernel) -> None:
    lines = ("print(", "'whole')", "tensor = x +", "nothing at all", "dist.all_reduce?", "nothing_here?", "c")
    cell = kernel.debug(STOPS + RUN, *lines).check()
    assert "whole\n" in plain(cell)
    assert "SyntaxError" in plain(cell)
    assert "Reduces the tensor data across all machines" in plain(cell)
    assert "[rank 1] Signature" not in plain(cell)
    assert "NameError: name 'nothing_here' is not defined" in plain(cell)


def test_a_breakpoint_ends_with_its_task(kernel: Kernel) -> None:
    kernel.run("%distributed session -n 1 --name breaks").check()
    try:
        kernel.run("%%distributed\ndef g():\n    return 5").check()
        kernel.debug("%%distributed\nbreakpoint()\nx = 1", "b g", "c").check()
        cell = kernel.run("%%distributed\nimport sys\ng(), sys.gettrace()").check()
        assert "(5, None)" in cell.text
        assert "(rank" not in cell.text
        cell = kernel.debug("%%distributed\nbreakpoint()\nx = 1", "b", "c").check()
        assert "Num Type" not in plain(cell)
    finally:
        kernel.run("%distributed session stop --name breaks").check()


def test_n_goes_over_an_await(kernel: Kernel) -> None:
    body = (
        "%%distributed -n 1\nimport asyncio\nasync def work():\n    v = 1\n    breakpoint()\n"
        "    await asyncio.sleep(0.05)\n    v += 41\n    return v\nawait work()"
    )
    cell = kernel.debug(body, "p v", "n", "n", "p v * 2", "c").check()
    assert re.search(r"^1$", plain(cell), re.M)
    assert re.search(r"^84$", plain(cell), re.M)


def test_a_second_threads_breakpoint_waits_for_its_turn(kernel: Kernel) -> None:
    body = (
        "%%distributed -n 1\nimport threading\ndef other():\n    here = 'in a thread'\n    at.set()\n"
        "    breakpoint()\n    return here\nat = threading.Event()\nworker = threading.Thread(target=other)\n"
        "def first():\n    mine = 'in the main one'\n    breakpoint()\n    return mine\n"
        "worker.start(); at.wait(); first(); worker.join()"
    )
    cell = kernel.debug(body, "p locals().get('here') or mine", "c", "p locals().get('here') or mine", "c").check()
    assert "'in a thread'" in plain(cell)
    assert "'in the main one'" in plain(cell)
    assert "AttributeError" not in plain(cell)


def test_a_breakpoint_in_what_a_command_calls_is_passed_by(kernel: Kernel) -> None:
    body = "%%distributed -n 1\ndef f():\n    breakpoint()\n    return 7\ndef g():\n    breakpoint()\n    return 1\ng()"
    cell = kernel.debug(body, "p f() * 3", "w", "c").check()
    assert re.search(r"breakpoint\(\) at Cell In\[\d+\], line 3, in f \(rank 0\): already in the debugger", plain(cell))
    assert re.search(r"^21$", plain(cell), re.M)
    assert "AttributeError" not in plain(cell)


def test_a_look_ends_with_the_task_and_spares_the_next(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("%distributed session -n 2 --name looks").check()
    try:
        waits = f"open({str(tmp_path / 'here')!r}, 'w')\n    "
        waits += f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
        request = kernel.start_cell(
            f"%%distributed\nimport os, time\nif rank == 1: breakpoint()\nelse:\n    {waits}\n1"
        )
        eventually((tmp_path / "here").exists)
        kernel.type(request, "rank 0", "p rank")
        assert kernel.wait_for_prompt() == PROMPTS[0]
        (tmp_path / "go").touch()
        kernel.finish_cell(request, until=GONE)
        kernel.client.input("")
        assert kernel.wait_for_prompt() == PROMPTS[1]
        kernel.client.input("c")
        kernel.finish_cell(request).check()
        cell = kernel.debug("%%distributed\nif rank == 0: breakpoint()\nrank", "p rank + 70", "c").check()
        assert re.search(r"^70$", plain(cell), re.M)
    finally:
        kernel.run("%distributed session stop --name looks").check()


def test_other_threads_print_to_the_log_meanwhile(kernel: Kernel) -> None:
    body = (
        "%%distributed -n 1\nimport threading, time\ngo, done = threading.Event(), threading.Event()\n"
        "def ticks():\n    go.wait()\n    print('tick of a thread')\n    done.set()\n"
        "threading.Thread(target=ticks).start()\nbreakpoint()\nx = 1"
    )
    cell = kernel.debug(body, "!go.set(); done.wait(); print('of the command')", "c").check()
    assert "[rank 0] tick of a thread" in cell.text
    assert re.search(r"^of the command$", plain(cell), re.M)


def test_torchs_own_breakpoint_stops_one_rank(kernel: Kernel) -> None:
    cell = kernel.debug(
        "%%distributed -n 2\nimport torch.distributed as dist\ndist.breakpoint(1)\ny = rank * 50\ny", "n", "p y", "c"
    ).check()
    assert cell.prompts == [PROMPTS[1]] * 3
    assert re.search(r"^50$", plain(cell), re.M)


def test_input_after_q_raises_instead_of_waiting(kernel: Kernel) -> None:
    body = "%%distributed -n 1 --stop-grace 600\ntry:\n    breakpoint()\n    x = 1\nfinally:\n    input('save? ')"
    cell = kernel.debug(body, "q")
    assert cell.error.startswith("KeyboardInterrupt")


BOTH = "%%distributed -n 2 -o _\nx = (rank + 1) * 100\nbreakpoint()\ny = x + 1\nx"


def test_ranks_that_stop_are_debugged_one_at_a_time(kernel: Kernel) -> None:
    request = kernel.start_cell(BOTH)
    first = int(kernel.wait_for_prompt()[len("(rank ")])
    other = 1 - first
    kernel.finish_cell(request, until=f"`rank {other}` switches to it")
    kernel.client.input(f"rank {other}")
    cell = kernel.type(request, "p x", "ranks", f"rank {first}", "p x", "c", "c")
    said = plain(kernel.finish_cell(request).check())
    assert cell.prompts == [PROMPTS[other]] * 3 + [PROMPTS[first]] * 2 + [PROMPTS[other]]
    assert said.index(f"\n{other + 1}00\n") < said.index(f"\n{first + 1}00\n")
    assert len(re.findall(r"^rank \d stopped at a breakpoint", said, re.M)) >= 4


def test_all_ranks_continue_together(kernel: Kernel) -> None:
    request = kernel.start_cell("%%distributed -n 2\nbreakpoint()\nprint('on', rank)")
    kernel.wait_for_prompt()
    kernel.finish_cell(request, until="switches to it")  # both have stopped
    kernel.client.input("all c")
    said = plain(kernel.finish_cell(request).check())
    assert "on 0" in said
    assert "on 1" in said


def test_ranks_that_run_can_be_looked_at(kernel: Kernel) -> None:
    lines = ("all p rank * 7", "all nonsense", "rank 0", "p rank, x", "n", "q", "p rank", "c")
    cell = kernel.debug(STOPS + RUN, *lines).check()
    said = plain(cell)
    assert "rank 1: 7\n" in said
    assert "rank 0: 0\n" in said
    assert said.count("NameError: name 'nonsense' is not defined") == 2
    assert cell.prompts == [*[PROMPTS[1]] * 3, *[PROMPTS[0]] * 3, *[PROMPTS[1]] * 2]
    assert re.search(r"rank 0 is running, Cell In\[\d+\], line 8\n", said)
    assert "(0, tensor([0., 0.]))" in said
    assert "This rank is running and cannot be stepped" in said


@pytest.mark.parametrize("quits", ["q", "\x04"])
def test_quitting_interrupts_every_rank(kernel: Kernel, quits: str) -> None:
    stops = "try:\n    breakpoint() if rank else dist.barrier()\n    done = 1\nfinally:\n    print('finally', rank)"
    kernel.run("import torch.distributed as dist").check()
    cell = kernel.debug(f"%%distributed -n 2\ndist.barrier()\n{stops}", quits)
    assert cell.error.startswith("KeyboardInterrupt: Cell In[")
    assert "[rank 0] finally 0" in cell.text
    assert "[rank 1] finally 1" in cell.text


def test_pdbs_own_call_stops_too_and_the_last_expression_is_a_line_like_others(kernel: Kernel) -> None:
    calls = "import pdb; pdb.set_trace()\nv = 6\nfrom pdb import set_trace; set_trace()\nv + 15"
    cell = kernel.debug(f"%%distributed -n 1 -o last\nv = 5\n{calls}", "p v + 1", "c", "p v + 2", "n", "n").check()
    said = plain(cell)
    assert "\n6\n" in said
    assert "\n8\n" in said
    assert "----> 6 v + 15" in said
    assert "worker.py" not in said
    assert "__nblaunch" not in said
    assert kernel.ask("list(last)") == [21]


def test_an_imported_module_can_stop(kernel: Kernel, folder: Path) -> None:
    (folder / "stops_here.py").write_text("def f(a):\n    b = a * 2\n    breakpoint()\n    return b\n")
    kernel.run("import sys; sys.path.insert(0, str(folder))").check()
    cell = kernel.debug("%%distributed -n 1 -o _\nimport stops_here\nstops_here.f(21)", "p b", "u", "c").check()
    assert "stops_here.py, line 4" in plain(cell)
    assert "\n42\n" in plain(cell)
    assert "stops_here.f(21)" in plain(cell)


def test_a_child_process_of_a_rank_goes_on(kernel: Kernel) -> None:
    body = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, n):
        breakpoint()
        return n
list(torch.utils.data.DataLoader(Data(), num_workers=1))"""
    kernel.run("import torch").check()
    cell = kernel.run(f"%%distributed -n 1 -o _\n{body}").check()
    assert "called in a child process of the rank, so the breakpoint is skipped" in cell.text


# ------------------------------------------------------------------ time, stops and deaths
@pytest.mark.parametrize("typed", ["", "import time; print('sleeps', flush=True); time.sleep(600)"])
def test_an_interrupt_ends_the_debugging_and_a_typed_statement(kernel: Kernel, typed: str) -> None:
    with kernel.changed("nblaunch.notebook.notebook_frontend", "_SERVE_INTERVAL_S", 0):
        request = kernel.start_cell(STOPS + RUN)
        kernel.wait_for_prompt()
        if typed:
            kernel.client.input(typed)
        kernel.interrupt()
        cell = kernel.finish_cell(request)
    assert cell.error.startswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    ("victim", "shown", "raised"),
    [
        ("os.getpid() if rank else 0", GONE, "RankDiedError"),
        ("0 if rank else os.getpid()", "rank 0", "RankDiedError"),
        ("os.getppid()", GONE, "Rank(Lost|Died)Error"),
    ],
    ids=["the rank that stops", "a rank that waits", "the reaper"],
)
def test_a_death_ends_the_debugging(kernel: Kernel, folder: Path, victim: str, shown: str, raised: str) -> None:
    note = f"import os\n    if {victim}: (folder / 'pid').write_text(str({victim}))\n    x = torch"
    request = kernel.start_cell(STOPS.replace("x = torch", note, 1) + RUN)
    kernel.wait_for_prompt()
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    kernel.finish_cell(request, until=shown)
    kernel.client.input("c")
    assert re.match(raised, kernel.finish_cell(request).error)
    kernel.run("notebook_launcher(lambda: None, num_processes=1)").check()


def test_a_stop_from_elsewhere_ends_the_debugging(kernel: Kernel, folder: Path) -> None:
    stops = "import threading, time\nfrom nblaunch.launch.handle import live_launches as live\n"
    stops += "def stop():\n    while not (folder / 'go').exists(): time.sleep(0.01)\n    live()[0].stop()\n"
    request = kernel.start_cell(f"{STOPS}{stops}threading.Thread(target=stop).start()\n{RUN}")
    kernel.wait_for_prompt()
    (folder / "go").touch()
    kernel.finish_cell(request, until=GONE)
    kernel.client.input("")
    assert kernel.finish_cell(request).error.startswith("LaunchStoppedError")


# ------------------------------------------------------------------ after an exception
FAILS = """%%distributed -n 2
def f(a):
    b = a * 2; dist.barrier()
    if rank == 1:
        raise ValueError("no")
    dist.barrier()
f(3)"""


def test_the_rank_that_fails_first_is_debugged_with_its_frames(kernel: Kernel) -> None:
    kernel.run("import torch.distributed as dist").check()
    cell = kernel.debug(FAILS.replace("-n 2", "-n 2 --pdb"), "p a, b", "u", "p rank", "all p rank", "n")
    said = plain(cell)
    assert cell.prompts == [PROMPTS[1]] * 5
    assert re.search(r"rank 1 raised ValueError: no, Cell In\[\d+\], line 5\n", said)
    assert "(3, 6)\n" in said
    assert "rank 0: 0\n" in said
    assert cell.error.startswith("ValueError: no")


def test_pdb_on_is_honoured(kernel: Kernel) -> None:
    kernel.run("import torch.distributed as dist\n%pdb on").check()
    try:
        cell = kernel.debug(FAILS, "p b", "q")
        kernel.debug("1 / 0", "q")  # IPython's own debugger, afterwards
    finally:
        kernel.run("%pdb off").check()
    assert "\n6\n" in plain(cell)
    assert cell.error.startswith("ValueError: no")


def test_on_error_is_checked(kernel: Kernel) -> None:
    kernel.run(STOPS).check()
    for wrong in ("on_error='pdb'", "on_breakpoint='stop'"):
        error = kernel.run(f"notebook_launcher(train, num_processes=2, {wrong})").error
        assert error.startswith(f"ArgumentError: {wrong}")


# ------------------------------------------------------------------ sessions, and launches in the background
def test_a_session_keeps_its_variables(kernel: Kernel) -> None:
    kernel.run("import torch\nimport torch.distributed as dist\n%distributed session -n 2").check()
    try:
        kernel.run("%%distributed\nkept = rank + 40").check()
        cell = kernel.debug("%%distributed\nif rank:\n    breakpoint()\n    kept += 1\ndist.barrier()", "p kept", "q")
        assert "\n41\n" in plain(cell)
        assert cell.error.startswith("KeyboardInterrupt")
        kernel.run("%%distributed -o sums\nt = torch.tensor([kept])\ndist.all_reduce(t)\nt.item()").check()
        assert kernel.ask("list(sums)") == [81, 81]
        assert "\n40\n" in plain(
            kernel.debug("%%distributed\nbreakpoint() if not rank else 0\n5", "p kept", "c").check()
        )
    finally:
        kernel.run("%distributed session stop").check()


def test_the_last_error_of_a_session_is_debugged(kernel: Kernel) -> None:
    kernel.run("import torch\nimport torch.distributed as dist\n%distributed session -n 2").check()
    try:
        assert "the last task raised no exception" in kernel.run("%distributed debug").text
        failed = kernel.run(FAILS.replace(" -n 2", ""))
        assert "`%distributed debug` opens the debugger on this error" in failed.text
        kernel.run("%distributed who").check()  # a question keeps the frames
        cell = kernel.debug("%distributed debug", "p a, b", "u", "n").check()
        assert cell.prompts == [PROMPTS[1]] * 3
        assert re.search(r"rank 1 raised ValueError: no, Cell In\[\d+\], line 5\n", plain(cell))
        assert "(3, 6)\n" in plain(cell)
        assert "this rank raised no exception in the last task" in kernel.run("%distributed debug --rank 0").text
        assert "UsageError: --rank 7: the ranks are 0 and 1" in kernel.run("%distributed debug --rank 7").text
        assert "\n6\n" in plain(kernel.debug("%distributed debug", "p b", "q").check())
        kernel.run("%%distributed -o sums\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").check()
        assert kernel.ask("list(sums)") == [2.0, 2.0]
        assert "the last task raised no exception" in kernel.run("%distributed debug").text
    finally:
        kernel.run("%distributed session stop").check()


# ------------------------------------------------------------------ input()
def test_a_rank_and_its_debugger_can_ask_for_input(kernel: Kernel) -> None:
    body = "import getpass\nname = input('name? ')\nsecret = getpass.getpass('secret? ')\nbreakpoint()\nname, secret"
    lines = ("rank 0", "1234", "!name = input('other name? ')", "ann", "p name", "c")
    cell = kernel.debug(f"%%distributed -n 1 -o said\n{body}", *lines).check()
    asked = [prompt for prompt in cell.prompts if prompt != "(rank 0 of 1) "]
    assert asked == ["(rank 0 of 1) name? ", "(rank 0 of 1) secret? ", "(rank 0 of 1) other name? "]
    assert "'ann'\n" in plain(cell)
    assert kernel.ask("list(said)") == [("ann", "1234")]
    assert "1234" not in cell.text


# ------------------------------------------------------------------ where no one can type
@pytest.fixture
def silent(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel of a front end without an input box, such as papermill's."""
    kernel.client.allow_stdin = False
    yield kernel
    kernel.client.allow_stdin = True


def test_without_an_input_box_the_rank_goes_on(silent: Kernel) -> None:
    cell = silent.run(STOPS.replace("y = x", "breakpoint(); y = x") + RUN).check()
    assert re.search(
        r"\[rank 1\] breakpoint\(\) at Cell In\[\d+\], line 7, in train \(rank 1\): input is not possible here",
        cell.text,
    )
    assert "[[1.0, 1.0], [1.0, 1.0]]" in cell.text


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        (
            f"{STOPS}notebook_launcher(train, num_processes=2, on_breakpoint='fail')",
            r"RuntimeError: breakpoint\(\) at .*rank 1",
        ),
        ("%%distributed -n 1\ninput('name? ')", r"EOFError: input\('name\? '\): input is not possible here"),
        (FAILS.replace("-n 2\n", "-n 2 --pdb\nimport torch.distributed as dist\n"), "ValueError: no"),
    ],
    ids=["a breakpoint may fail instead", "input() ends", "an error is just raised"],
)
def test_without_an_input_box(silent: Kernel, cell: str, error: str) -> None:
    assert re.match(error, silent.run(cell).error)


def test_a_cell_whose_output_is_captured_goes_on(kernel: Kernel) -> None:
    kernel.run(f"%%capture said\n{STOPS}{RUN}").check()
    assert "input is not possible here" in kernel.ask("said.stdout + said.stderr")


def test_pythonbreakpoint_0_disables_breakpoints(kernel: Kernel) -> None:
    cell = kernel.run(STOPS + RUN.replace("=2", "=2, env={'PYTHONBREAKPOINT': '0'}")).check()
    assert "breakpoint" not in cell.text


# ------------------------------------------------------------------ news while a prompt waits
ENDS = """
def train(rank):
    import time
    while rank and not (folder / 'stopped').exists():
        time.sleep(0.01)
    if rank:
        raise ValueError('no')
    breakpoint()
    import torch.distributed as dist
    dist.barrier()
"""


def test_a_failure_is_announced_at_the_prompt(kernel: Kernel, folder: Path) -> None:
    said = r"rank 1 raised ValueError: no \(Cell In\[\d+\], line 6\)"
    request = kernel.start_cell(ENDS + RUN)
    kernel.wait_for_prompt()
    (folder / "stopped").touch()
    cell = kernel.finish_cell(request, until="the launch ends when you close the debugger")
    assert re.search(f"^{said}; the launch ends", plain(cell), re.M)
    time.sleep(1)  # longer than the delay of the note that the others are stopped
    kernel.client.input("ranks")
    kernel.wait_for_prompt()
    kernel.finish_cell(request, until="rank 0 stopped at a breakpoint, ")
    assert "stopping the other ranks" not in cell.text
    kernel.client.input("c")
    assert kernel.finish_cell(request).error.startswith("ValueError: no")
    assert len(re.findall(f"^{said}", plain(cell), re.M)) == 2


# ------------------------------------------------------------------ launches in the background
def stopped_in_the_background(kernel: Kernel) -> str:
    """Start a launch `job` in the background, and return the cell's request once a rank has stopped."""
    begin = kernel.start_cell(f"{STOPS}job = notebook_launcher(train, num_processes=2, block=False)")
    kernel.finish_cell(begin).check()
    kernel.run("import time\nwhile not job.console.stopped: time.sleep(0.01)").check()
    return begin


def test_a_stop_in_the_background_is_noted(kernel: Kernel) -> None:
    begin = stopped_in_the_background(kernel)
    assert "; rank 1 stopped at a breakpoint, Cell In[" in kernel.run("job").value
    assert "; rank 1 stopped at a breakpoint, Cell In[" in kernel.run("%distributed status").text
    cell = kernel.follow_cell(begin, ": to type there, call wait() or result(), or run %distributed debug")
    assert "tensor([1., 1.])" in plain(kernel.debug("%distributed debug", "p x", "c").check())
    assert kernel.ask("list(job.result())") == [[1.0, 1.0], [1.0, 1.0]]
    assert cell.text.count("to type there, call") == 1


def test_a_breakpoint_that_nothing_shows_is_passed_by(kernel: Kernel) -> None:
    kernel.run(f"{STOPS}job = notebook_launcher(train, num_processes=2, block=False, view='none')").check()
    cell = kernel.run("print(job.wait(60), list(job.result()), job.result().logs[1].err)").check()
    assert "True [[1.0, 1.0], [1.0, 1.0]]" in cell.text


def test_a_wait_that_is_over_ends_after_the_line(kernel: Kernel) -> None:
    stopped_in_the_background(kernel)
    request = kernel.start_cell("print('ended:', job.wait(2))")
    kernel.wait_for_prompt()
    time.sleep(2.5)  # longer than the timeout
    kernel.client.input("p x")
    assert "ended: False" in kernel.finish_cell(request).check().text
    assert "[[1.0, 1.0], [1.0, 1.0]]" in kernel.debug("print(list(job.result()))", "c").check().text


STOPS_FIRST = """
def train(rank):
    import time
    if not (folder / 'again').exists():
        (folder / 'again').touch()
        breakpoint()
        raise ValueError('first')
    time.sleep(0.5)
    return 7
print(list(notebook_launcher(train, num_processes=1, timeout=8, max_restarts=1)))
"""


def test_time_in_a_debugger_counts_in_no_attempt(kernel: Kernel, folder: Path) -> None:
    request = kernel.start_cell(STOPS_FIRST)
    kernel.wait_for_prompt()
    time.sleep(8.5)  # longer than the timeout
    kernel.client.input("c")
    assert "[7]" in kernel.finish_cell(request).check().text
