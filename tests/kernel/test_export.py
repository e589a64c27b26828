"""`nblaunch.export` and ``%%distributed --export`` in a real kernel; the scripts run under the real torchrun."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.harness import Kernel
from tests.torchrun import torchrun

CELLS = (
    "import json, random\nimport numpy as np\nimport torch\nimport torch.distributed as dist\nimport nblaunch\n"
    "from torch import nn, optim\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n%matplotlib inline",
    "from torch.utils.data import DataLoader, DistributedSampler, TensorDataset",
    "# images on each rank\nBATCH = 4\nWIDTH = 8",
    "class Base(nn.Module):\n    def scores(self, x):\n        return self.layer(x)\n",
    "class Net(Base):\n    '''A net.'''\n    def __init__(self, width):\n        super().__init__()\n"
    "        self.layer = nn.Linear(width, 2)\n    forward = Base.scores",
    "class Scale:\n    def __init__(self, by): self.by = by\n    def __call__(self, x): return x * self.by\n"
    "square = lambda x: x ** 2",
    "def powers(exponent):\n    def power(x):\n        return x**exponent\n    return power\ncube = powers(3)",
    "def train(epochs, lr, rank, world_size, device):\n"
    "    torch.manual_seed(5)\n"
    "    images = torch.randn(32, WIDTH)\n"
    "    dataset = TensorDataset(images, (images.sum(1) > 0).long())\n"
    "    net, scale = Net(WIDTH), Scale(0.5)\n"
    "    model = DDP(net.to(device))\n"
    "    optimizer = optim.SGD(model.parameters(), lr=lr)\n"
    "    sampler = DistributedSampler(dataset, seed=1)\n"
    "    for epoch in range(epochs):\n"
    "        sampler.set_epoch(epoch)\n"
    "        for x, y in DataLoader(dataset, batch_size=BATCH, sampler=sampler):\n"
    "            loss = square(scale(nn.functional.cross_entropy(model(x.to(device)), y.to(device))))\n"
    "            optimizer.zero_grad()\n"
    "            loss.backward()\n"
    "            optimizer.step()\n"
    "    total = net.layer.weight.detach().sum() * (rank + 1)\n"
    "    dist.all_reduce(total)\n"
    "    found = [loss.item(), total.item(), world_size, cube(2), float(np.arange(3.0).sum())]\n"
    "    with open(f'rank{rank}.json', 'w') as file:\n"
    "        json.dump(found, file)\n"
    "    return found",
)


@pytest.fixture(scope="module")
def shared_notebook(shared_kernel: Kernel) -> Kernel:
    for cell in CELLS:
        shared_kernel.run(cell).check()
    return shared_kernel


@pytest.fixture
def notebook(shared_notebook: Kernel, tmp_path: Path) -> Kernel:
    """A notebook whose folder is the test's."""
    shared_notebook.run(f"%cd -q {tmp_path}").check()
    return shared_notebook


def run_in_ranks(kernel: Kernel, script: str) -> str:
    """Run a script in two ranks of a launch, which have the environment that torchrun gives, and torch already."""
    kernel.run("def run(script):\n    import runpy\n    runpy.run_path(script, run_name='__main__')").check()
    options = "num_processes=2, view='text', device='cpu', threads_per_rank=1"
    return kernel.run(f"_ = notebook_launcher(run, ({script!r},), {options})").check().stdout


def found_by(folder: Path) -> list[list[Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


# ------------------------------------------------------------------ the same numbers
def test_an_exported_function_gives_the_same_numbers(notebook: Kernel, tmp_path: Path) -> None:
    options = "num_processes=2, device='cpu', threads_per_rank=1"
    expected = notebook.ask(f"list(notebook_launcher(train, (2,), kwargs={{'lr': 0.1}}, view='none', {options}))")
    job = tmp_path / "job"
    job.mkdir()

    shown = notebook.run(f"nblaunch.export(train, 'job/train.py', (2,), {{'lr': 0.1}}, {options})").check()
    (job / "nblaunch.py").write_text("raise ImportError('only torch is here')\n")
    printed = torchrun(job / "train.py")

    assert "run it: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 job/train.py" in shown.value
    assert found_by(job) == expected
    assert printed == ""


def test_an_exported_cell_gives_the_same_numbers(notebook: Kernel, tmp_path: Path) -> None:
    body = 'text = """a\nb"""\nif text == \'a\\nb\':\n    train(1, 0.2, rank, world_size, device)\ntext'
    notebook.run(f"%%distributed -n 2 --threads-per-rank 1 --device cpu\n{body}").check()
    expected = found_by(tmp_path)
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").unlink()

    line = "%%distributed --export cell.py -n 2 -o out --device cpu --metric 'x (?P<x>.)'"
    shown = notebook.run(f"{line}\n{body}").check()
    assert not (tmp_path / "rank0.json").exists()
    run_in_ranks(notebook, "cell.py")

    assert "wrote cell.py\nrun it: torchrun --nproc-per-node 2 cell.py" in shown.stdout
    assert found_by(tmp_path) == expected


def test_the_script_reads_as_the_notebook(notebook: Kernel, tmp_path: Path) -> None:
    notebook.run("nblaunch.export(train, 'train.py', (1, 0.1), device='cpu')").check()

    text = (tmp_path / "train.py").read_text()
    for part in (
        "\nimport json, random\n",
        "\n# images on each rank\nBATCH = 4\n",
        "\ncube = powers(3)\n",
        CELLS[4].strip(),
        CELLS[-1],
        'def main():\n    rank = int(os.environ["RANK"])\n    world_size = int(os.environ["WORLD_SIZE"])\n'
        '    device = torch.device("cpu")\n    torch.distributed.init_process_group("gloo")\n',
        "    train(1, 0.1, rank=rank, world_size=world_size, device=device)\n"
        "    torch.distributed.destroy_process_group()\n\n\n"
        'if __name__ == "__main__":\n    main()\n',
    ):
        assert text.count(part) == 1


def test_code_with_its_own_group_and_reports_runs(notebook: Kernel, tmp_path: Path) -> None:
    notebook.run(
        "import os, socket\nwith socket.socket() as s:\n    s.bind(('', 0)); port = s.getsockname()[1]"
    ).check()
    notebook.run(
        "def setup(rank, world_size):\n    os.environ['MASTER_ADDR'] = 'localhost'\n"
        "    os.environ['MASTER_PORT'] = str(port)\n"
        "    dist.init_process_group('gloo', rank=rank, world_size=world_size)"
    ).check()
    notebook.run("def main(rank):\n    setup(rank, 2)\nnblaunch.export(main, 'main.py')").check()
    assert "\ndef run_rank():\n" in (tmp_path / "main.py").read_text()
    body = (
        "setup(rank, world_size)\ndist.barrier()\n"  # a rank that exits at once ends the connections of the other
        "nblaunch.report(step=rank, loss=1.0)\nprint(f'{dist.get_world_size()}\\n', end='')"
    )
    notebook.run(f"%%distributed --export own.py\n{body}").check()

    assert {"[rank 0] 2", "[rank 1] 2"} <= set(run_in_ranks(notebook, "own.py").splitlines())
    assert "\nimport nblaunch\n" in (tmp_path / "own.py").read_text()


# ------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("x = 1\n!ls", r"UsageError: Cell In[N], line 3: `!ls` is IPython syntax: rewrite it in Python"),
        ("x = 1\ny = await f()", "UsageError: Cell In[N]: a script cannot use await outside a function"),
    ],
    ids=["command", "await"],
)
def test_a_cell_that_no_script_can_run_is_refused(kernel: Kernel, tmp_path: Path, cell: str, message: str) -> None:
    kernel.run(f"%cd -q {tmp_path}")
    done = kernel.run(f"%%distributed --export cell.py\n{cell}")

    assert message.replace("[N]", f"[{done.reply['execution_count']}]") in (done.error or done.stderr + done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_a_value_is_refused(notebook: Kernel, tmp_path: Path) -> None:
    notebook.run("net = Net(2)\ndef use(): return net").check()
    done = notebook.run("nblaunch.export(use, 'use.py')")
    given = notebook.run("nblaunch.export(train, 'use.py', (Net(3), 0.1))")

    assert "`net`, which `use` uses: a Net cannot be written into a script: create it in the function" in done.error
    assert "`args[0]`: a Net cannot be written into a script: create it in the function, or load it" in given.error
    assert list(tmp_path.iterdir()) == []


def test_a_users_file_stays_without_force(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(f"%cd -q {tmp_path}")
    script = tmp_path / "train.py"
    script.write_text("mine")
    done = kernel.run("%%distributed --export train.py --sbatch\nprint(rank)")
    assert "train.py already exists: use another name, or --force" in done.error + done.text
    assert script.read_text() == "mine"

    shown = kernel.run("%%distributed --export train.py --sbatch --force -n 3\nprint(rank)").check()
    again = kernel.run("%%distributed --export train.py\nprint(rank + 1)")
    assert shown.stdout.splitlines()[-2:] == [
        "run it: torchrun --nproc-per-node 3 train.py",
        "    or: sbatch train.sbatch",
    ]
    assert "train.py already exists: use another name, or --force" in again.error + again.text
    assert "print(rank)" in script.read_text()
    subprocess.run(["bash", "-n", str(tmp_path / "train.sbatch")], check=True)


def test_the_job_file_has_the_options_of_the_engine(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(f"%cd -q {tmp_path}\nimport nblaunch\ndef train(): pass").check()
    engine = "slurm --partition=gpu --time=60 --gres=gpu:2"
    kernel.run(f'%%distributed --engine "{engine}" --nodes 2 --export cell.py --sbatch\nprint(rank)').check()
    kernel.run(f"nblaunch.export(train, 'train.py', engine='{engine}', num_nodes=2, sbatch=True)").check()
    for name in ("cell", "train"):
        text = (tmp_path / f"{name}.sbatch").read_text()
        for part in (*engine.split()[1:], "--nodes=2"):
            assert f"#SBATCH {part}\n" in text

    done = kernel.run("%%distributed --engine 'slurm -N 2' --export other.py --sbatch\nprint(rank)")
    assert "UsageError: --engine 'slurm -N 2': -N: use num_nodes= (--nodes)" in done.error + done.text
    shown = kernel.run("%%distributed --engine 'ssh a b' --export third.py\nprint(rank)").check()
    assert "note: the script does not use engine='ssh': start torchrun on each node yourself\n" in shown.stdout
