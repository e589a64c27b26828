"""`save_state` and `load_state` over real ranks: bit-equal resuming, another number of ranks, errors on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nblaunch import LaunchResult, notebook_launcher
from nblaunch.training import Accelerator

SAMPLES, BATCH = 48, 2


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_VIEW", "none")


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise of all three generators to each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(3) + random.random() + np.random.rand()
        return torch.full((3,), float(index)) + noise, torch.tensor(index % 2)


class Net(nn.Module):
    """Uses its layers in another order than it has them, so that DDP regroups the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(7, 2)
        self.middle = nn.Linear(5, 7)
        self.first = nn.Linear(3, 5)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.dropout(self.middle(self.first(inputs).tanh()).tanh()))
        return output


def train(
    start: int, batches: int, save: Path | None = None, save_at: int = 0, load: Path | None = None, **options: Any
) -> list[Tensor]:
    """Train for this many batches, from the beginning or from a saved state, and return what later steps depend on."""
    workers = options.pop("num_workers", 0)
    accelerator = Accelerator(compute_setup="cpu", seed=1, **options)
    torch.manual_seed(start + accelerator.rank)
    random.seed(start + accelerator.rank)
    np.random.seed(start + accelerator.rank)
    net = Net()
    inner = torch.optim.Adam(net.parameters(), lr=0.03)
    model, optimizer, loader = accelerator.prepare(
        net, inner, DataLoader(Augmented(), BATCH, True, num_workers=workers)
    )
    done = 0
    if load is not None:
        accelerator.load_state(load)
        done = save_at
    while done < batches:
        for inputs, target in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), target))
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            if done == save_at and save is not None:
                accelerator.save_state(save)
            if done == batches:
                break
    return [*net.state_dict().values(), torch.rand(2), torch.tensor(random.random()), torch.tensor(np.random.rand())]


def launched(function: Callable[..., Any], ranks: int, *args: Any) -> LaunchResult:
    result = notebook_launcher(function, args, num_processes=ranks, device="cpu")
    assert isinstance(result, LaunchResult)
    return result


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"gradient_accumulation_steps": 3}, {"mixed_precision": "fp16"}],
    ids=["plain", "workers", "accumulating", "fp16"],
)
def test_ranks_resume_to_the_same_bits(ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    per_pass = SAMPLES // BATCH // ranks
    for save_at in (5, per_pass + 4):
        path = tmp_path / f"at{save_at}"

        def both(path: Path = path, save_at: int = save_at) -> tuple[list[Tensor], list[Tensor]]:
            batches = per_pass + 8
            whole = train(5, batches, save=path, save_at=save_at, **options)
            return whole, train(11, batches, load=path, save_at=save_at, **options)

        for whole, resumed in launched(both, ranks):
            assert equal(whole, resumed), save_at


# ------------------------------------------------------------------ another number of ranks
def test_another_number_of_ranks_takes_what_is_left(tmp_path: Path) -> None:
    """Each sample of an epoch comes once, whoever takes it; gradients of an unfinished step keep their mean."""

    def begin(accumulation: int = 1) -> tuple[Accelerator, Any, Any, Any]:
        accelerator = Accelerator(compute_setup="cpu", seed=1, gradient_accumulation_steps=accumulation)
        torch.manual_seed(2)
        net = nn.Linear(1, 1, bias=False)
        data = DataLoader(TensorDataset(torch.arange(SAMPLES).float().reshape(-1, 1)), BATCH, shuffle=True)
        model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
        return accelerator, model, optimizer, loader

    def save(path: Path) -> tuple[list[float], Any, Tensor]:
        accelerator, model, _, loader = begin(accumulation=4)
        seen: list[float] = []
        torch.manual_seed(9 + accelerator.rank)
        for number, (inputs,) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).mean())
            seen += inputs.flatten().tolist()
            if number == 2:
                accelerator.save_state(path)
                return seen, [parameter.grad for parameter in model.parameters()], torch.rand(1)
        raise AssertionError("the loader is too short")

    def load(path: Path) -> tuple[list[float], Any, Tensor]:
        accelerator, model, _, loader = begin(accumulation=4)
        accelerator.load_state(path)
        drawn = torch.rand(1)
        gradients = [parameter.grad for parameter in model.parameters()]
        return [value for (inputs,) in loader for value in inputs.flatten().tolist()], gradients, drawn

    for before, after in ((2, 3), (3, 1), (1, 2)):
        path = tmp_path / f"{before}to{after}"
        saved, loaded = list(launched(save, before, path)), list(launched(load, after, path))
        assert sorted(sum((seen for seen, *_ in [*saved, *loaded]), [])) == list(range(SAMPLES))
        mean = torch.stack([gradient for _, (gradient,), _ in saved]).mean(0)
        assert all(torch.allclose(mean, gradient) for _, (gradient,), _ in loaded)
        drawn = [float(value) for *_, value in loaded]
        assert drawn[:before] == [float(value) for *_, value in saved][:after]
        assert len(set(drawn)) == after
        assert [float(value) for *_, value in launched(load, after, path)] == drawn


def test_one_process_on_the_cpu_continues_what_ranks_began(tmp_path: Path) -> None:
    """Without a seed, too: its loader has the ranks' order from then on."""

    def begin() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(compute_setup="cpu")
        return accelerator, accelerator.prepare(DataLoader(TensorDataset(torch.arange(SAMPLES)), BATCH, shuffle=True))

    def save() -> list[int]:
        accelerator, loader = begin()
        batches = iter(loader)
        seen = [value for _ in range(3) for value in next(batches)[0].tolist()]
        accelerator.save_state(tmp_path / "state")
        return seen

    seen = list(launched(save, 2))
    accelerator, loader = begin()
    assert isinstance(loader, CountedLoader)
    accelerator.load_state(tmp_path / "state")
    rest = [value for (batch,) in accelerator.skip_first_batches(loader, 3) for value in batch.tolist()]
    assert sorted(seen[0] + seen[1] + rest) == list(range(SAMPLES))
    assert len(list(loader)) == SAMPLES // BATCH


# ------------------------------------------------------------------ failures
def test_what_fails_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    def run(rank: int) -> list[str]:
        accelerator = Accelerator(compute_setup="cpu")
        net = accelerator.prepare(nn.Linear(200, 200))
        accelerator.save_state(tmp_path / "state")
        messages = []

        def expect(call: Callable[..., Any], *args: Any, **options: Any) -> None:
            with pytest.raises((ArgumentError, OSError, RuntimeError)) as caught:
                call(*args, **options)
            messages.append(f"{type(caught.value).__name__}: {caught.value}")

        expect(accelerator.save_state, tmp_path / ("a" if rank else "b"))
        expect(accelerator.load_state, tmp_path / "none")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # as a full disk
        expect(accelerator.save_state, tmp_path / "state")
        expect(accelerator.save_model, net, tmp_path, safe_serialization=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        def hook(*args: Any) -> None:
            if rank == 1:
                raise KeyError("hook")

        with accelerator.register_save_state_pre_hook(hook):
            expect(accelerator.save_state, tmp_path / "state")
        with accelerator.register_load_state_pre_hook(hook):
            expect(accelerator.load_state, tmp_path / "state")
        extra = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1)) if rank == 1 else None
        expect(accelerator.save_state, tmp_path / "state")
        expect(accelerator.load_state, tmp_path / "state")
        assert extra is None or rank == 1
        return messages

    first, second = launched(run, 2)
    for messages in (first, second):
        assert messages[0] == "ArgumentError: output_dir: the ranks passed different folders: give the same on every rank"
        assert messages[1].startswith("ArgumentError") and "there is no such folder" in messages[1]
        assert messages[6].startswith("ArgumentError: save_state: the ranks prepared or registered different objects")
    assert [message.partition(":")[0] for message in second[2:4]] == ["RuntimeError", "RuntimeError"]
    assert "rank 0" in second[2]
    assert first[4] == first[5] == "RuntimeError: rank 1: KeyError: 'hook'"
    assert "has prepared 1 optimizer" in second[7] and first[7].startswith("ArgumentError: rank 1: ")
    assert sorted(os.listdir(tmp_path)) == ["state"]


def test_a_rank_killed_while_it_writes_leaves_the_earlier_state(tmp_path: Path) -> None:
    def run(rank: int, kill: bool) -> float:
        accelerator = Accelerator(compute_setup="cpu")
        net: Any = accelerator.prepare(nn.Linear(2, 2))
        nn.init.constant_(net.module.weight, 1.0 if kill else 0.0)
        if kill:
            accelerator.save_state(tmp_path / "state")
            nn.init.constant_(net.module.weight, 2.0)
            if rank == 0:
                os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
            accelerator.save_state(tmp_path / "state")
        accelerator.load_state(tmp_path / "state")
        accelerator.save_state(tmp_path / "state")
        return float(net.module.weight.mean())

    with pytest.raises(RankDiedError):
        launched(run, 2, True)
    assert len(os.listdir(tmp_path)) == 2
    assert list(launched(run, 2, False)) == [1.0, 1.0]
    assert os.listdir(tmp_path) == ["state"]


def test_a_stopped_save_leaves_the_earlier_state(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        accelerator = Accelerator(compute_setup="cpu")
        net = accelerator.prepare(nn.Linear(2, 2))
        accelerator.save_state(tmp_path / "state")

        def hook(*args: Any) -> None:
            (tmp_path / f"reached{rank}").touch()
            while True:
                time.sleep(0.05)

        accelerator.register_save_state_pre_hook(hook)
        accelerator.save_state(tmp_path / "state")
        assert net is not None

    launch = notebook_launcher(run, num_processes=2, device="cpu", wait=False)
    assert isinstance(launch, Launch)
    eventually(lambda: (tmp_path / "reached0").exists() and (tmp_path / "reached1").exists())
    launch.stop()
    with pytest.raises(LaunchStoppedError):
        launch.result()
    assert sorted(os.listdir(tmp_path)) == ["reached0", "reached1", "state"]
    accelerator = Accelerator(compute_setup="cpu")
    net = accelerator.prepare(nn.Linear(2, 2))
    accelerator.load_state(tmp_path / "state")
    assert net is not None


# ------------------------------------------------------------------ elsewhere
SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from nblaunch.training import Accelerator

accelerator = Accelerator(cpu, seed=1)
torch.manual_seed(0)
net = nn.Linear(1, 1)
data = DataLoader(TensorDataset(torch.arange(12.0).reshape(-1, 1)), 2, shuffle=True)
model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3), data)
done = 0
if sys.argv[2] == "resume":
    accelerator.load_state(sys.argv[1])
    done = 1
for (inputs,) in loader:
    accelerator.backward(model(inputs).mean())
    optimizer.step()
    optimizer.zero_grad()
    done += 1
    if done == 1:
        accelerator.save_state(sys.argv[1])
accelerator.print(done, net.weight.item())
""".replace("Accelerator(cpu", 'Accelerator(compute_setup="cpu"')


def test_a_script_resumes_under_torchrun(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=2", f"--master-port={free_port}"]
    printed = [
        subprocess.run(
            [*command, tmp_path / "script.py", tmp_path / "state", how], capture_output=True, text=True, check=True
        ).stdout
        for how in ("begin", "resume")
    ]
    assert printed[0] == printed[1] != ""


def test_cells_of_a_session_save_and_load(tmp_path: Path) -> None:
    with session(2, device="cpu") as ranks:
        ranks.run(_begin_in_session, str(tmp_path / "state"))
        assert list(ranks.run(_load_in_session, str(tmp_path / "state"))) == [True, True]


def _begin_in_session(path: str) -> None:
    accelerator = Accelerator(compute_setup="cpu")
    net: Any = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(path)
    _KEPT.update(accelerator=accelerator, net=net, before=net.module.weight.tolist())
    nn.init.zeros_(net.module.weight)


def _load_in_session(path: str) -> bool:
    _KEPT["accelerator"].load_state(path)
    return bool(_KEPT["net"].module.weight.tolist() == _KEPT["before"])


_KEPT: dict[str, Any] = {}
