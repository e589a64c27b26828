"""The ways to run a function over ranks from a notebook, each as cells for a kernel of its own."""

from __future__ import annotations

from dataclasses import dataclass

_TRAIN = """
def train():
    import torch
    import torch.distributed as dist
    makes_its_own = not dist.is_initialized()  # with nblaunch the group is ready, and goes by itself
    if makes_its_own:
        dist.init_process_group("gloo")
    t = torch.ones(1)
    dist.all_reduce(t)
    if makes_its_own:
        dist.destroy_process_group()

def die():
    import os
    import torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()
"""

_TIMED = """
import time

def timed(function, ranks):
    begin = time.perf_counter()
    try:
        launch(function, ranks)
    except Exception:
        if function is not die:
            raise
    return time.perf_counter() - begin
"""


@dataclass(frozen=True)
class Contender:
    """A way to launch, by the cell that defines ``launch(function, ranks)``."""

    name: str
    setup: str

    @property
    def cells(self) -> str:
        """What its kernel runs first."""
        return _TRAIN + self.setup + _TIMED


def _nblaunch(method: str) -> str:
    return f"""
%load_ext nblaunch
from nblaunch import notebook_launcher

def launch(function, ranks):
    notebook_launcher(function, num_processes=ranks, start_method={method!r}, device="cpu", view="none")
"""


_ACCELERATE = """
import contextlib, io
from accelerate import notebook_launcher

def launch(function, ranks):
    with contextlib.redirect_stdout(io.StringIO()):
        notebook_launcher(function, num_processes=ranks, use_port="29511")
"""

_TORCH_SPAWN = """
import os, pathlib, socket, sys
import torch.multiprocessing as mp

# torch's spawn cannot find a function of a cell, so its user has to write a file
_folder = os.environ["BENCHMARK_FOLDER"]
pathlib.Path(_folder, "spawned_functions.py").write_text('''
import os
def run(rank, name, ranks, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    globals()[name]()
''' + TRAIN)
sys.path.insert(0, _folder)
import spawned_functions

def launch(function, ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(spawned_functions.run, args=(function.__name__, ranks, port), nprocs=ranks)
""".replace("TRAIN", f'"""{_TRAIN}"""')

_TORCHRUN = """
import os, pathlib, subprocess, sys

# torchrun starts a program, so its user has to write a file too
_program = pathlib.Path(os.environ["BENCHMARK_FOLDER"], "program.py")
_program.write_text('import sys\\n' + TRAIN + 'globals()[sys.argv[1]]()\\n')

def launch(function, ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run([*command, _program, function.__name__], check=True, capture_output=True)
""".replace("TRAIN", f"""'''{_TRAIN}'''""")

CONTENDERS = (
    Contender("nblaunch", _nblaunch("forkserver")),
    Contender("nblaunch, spawn", _nblaunch("spawn")),
    Contender("accelerate (fork)", _ACCELERATE),
    Contender("torch spawn", _TORCH_SPAWN),
    Contender("torchrun", _TORCHRUN),
)
BASELINE = "accelerate (fork)"
