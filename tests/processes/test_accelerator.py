"""The Accelerator over real ranks: each check runs in a launched function, several to a launch."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from nblaunch.training.accelerator import Accelerator
from tests.processes.conftest import Launcher

pytestmark = pytest.mark.usefixtures("imported_ahead")

WORLD = 3


class Pair(NamedTuple):
    x: Any
    y: Any


class collectives_of:  # noqa: N801  # reads as a phrase
    """Counts the collectives that are begun in its body."""

    NAMES = ("all_gather", "all_reduce", "broadcast", "all_gather_object", "barrier", "all_gather_into_tensor")

    def __enter__(self) -> list[str]:
        self.calls: list[str] = []
        self.real = {name: getattr(torch.distributed, name) for name in self.NAMES}
        for name, function in self.real.items():
            setattr(torch.distributed, name, self._counted(name, function))
        return self.calls

    def _counted(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *exc: object) -> None:
        for name, function in self.real.items():
            setattr(torch.distributed, name, function)


def message_of(call: Any) -> str:
    """What a call that is wrong says, on this rank."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("it raised nothing")


# ------------------------------------------------------------------ figures, nests, objects
def test_collectives(launch: Launcher) -> None:
    def check() -> dict[str, Any]:
        accelerator = Accelerator(compute_setup="cpu")
        rank, size = accelerator.rank, accelerator.world_size
        assert (size, accelerator.is_main_process) == (WORLD, rank == 0)

        # --- figures: keys in any order, one collective, exact
        figures: dict[str, Any] = {"count": 2**60 + rank, "loss": 0.1 * (rank + 1), "ok": rank > 0}
        figures["wide"] = torch.full((2, 2), float(rank), dtype=torch.float16)
        figures["hits"] = torch.tensor(rank, dtype=torch.int32)
        if rank == 1:
            figures = dict(reversed(figures.items()))
        with collectives_of() as calls:
            mean = accelerator.all_reduce_dict(figures)
        assert calls == ["all_gather"]
        assert list(mean) == list(figures)
        assert (mean["count"], mean["ok"]) == ((3 * 2**60 + 3) / 3, 2 / 3)
        assert mean["wide"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert (mean["wide"].dtype, mean["hits"].dtype, mean["hits"].shape) == (torch.float16, torch.float64, ())
        total = accelerator.all_reduce_dict(figures, "sum")
        assert (total["count"], total["ok"], total["loss"]) == (3 * 2**60 + 3, 2, 0.1 + 0.2 + 0.1 * 3)
        assert total["hits"].dtype == torch.int32
        most = accelerator.all_reduce_dict({**figures, "nan": float("nan") if rank == 1 else 0.0}, "max")
        assert (most["count"], most["ok"], most["hits"].item()) == (2**60 + 2, True, 2)
        assert most["nan"] != most["nan"]
        with collectives_of() as calls:
            large = accelerator.all_reduce_dict({"big": torch.full((1000,), rank), **figures}, op="min")
        assert len(calls) == 2
        assert large["big"].tolist() == [0] * 1000

        mixed = {"loss": 0 if rank == 1 else 0.5 + rank, "n": bool(rank) if rank < 2 else 3}  # as Python's literals go
        assert accelerator.all_reduce_dict(mixed, "sum") == {"loss": 3.0, "n": 4}
        assert repr(accelerator.all_reduce_dict(mixed, "min")) == "{'loss': 0.0, 'n': 0}"

        # --- a mismatch raises on every rank, and no rank hangs
        said = [message_of(lambda: accelerator.all_reduce_dict({"a": 1} if rank == 1 else {"a": 1, "b": 2.0}))]
        said.append(message_of(lambda: accelerator.all_reduce_dict({"a": torch.ones(rank + 1)})))
        said.append(message_of(lambda: accelerator.all_reduce_dict({"a": "text" if rank == 2 else 1.0})))

        said.append(message_of(lambda: accelerator.all_reduce_dict({"a": 10**400 if rank == 2 else 1}, "max")))

        # --- gather: rows by rank, of different counts, in any nest and any type
        nest: dict[str, Any] = {"p": Pair(torch.full((rank, 2), rank), torch.tensor(float(rank))), "none": None}
        nest["b"] = torch.full((1,), rank == 1)
        nest["z"] = torch.full((rank + 1,), rank + 1j)
        with collectives_of() as calls:
            gathered = accelerator.gather(nest if rank else dict(reversed(nest.items())))
        assert calls == ["all_gather", "all_gather"]
        assert gathered["p"].x.tolist() == [[1, 1], [2, 2], [2, 2]]
        assert gathered["p"].y.tolist() == [0.0, 1.0, 2.0]
        assert gathered["b"].tolist() == [False, True, False]
        assert gathered["z"].tolist() == [1j, 1 + 1j, 1 + 1j, 2 + 1j, 2 + 1j, 2 + 1j]
        assert gathered["none"] is None
        assert accelerator.gather(torch.ones(0, 3, dtype=torch.bfloat16)).shape == (0, 3)
        assert accelerator.gather(torch.arange(6).view(2, 3).t() + rank).shape == (9, 2)
        said.append(message_of(lambda: accelerator.gather(torch.ones(2, rank + 1))))
        said.append(message_of(lambda: accelerator.gather([torch.ones(1)] * (rank + 1))))
        said.append(message_of(lambda: accelerator.gather("text" if rank == 0 else torch.ones(1))))

        # --- reduce and broadcast
        reduced = accelerator.reduce(
            (torch.full((2,), rank, dtype=torch.bfloat16), torch.tensor(rank), torch.full((1,), 1j)), "mean"
        )
        assert [t.tolist() for t in reduced] == [[1.0, 1.0], 1.0, [1j]]
        assert [t.dtype for t in reduced] == [torch.bfloat16, torch.float64, torch.complex64]
        assert accelerator.reduce(torch.tensor(rank > 0)).item() == 2  # a sum
        assert accelerator.reduce(torch.tensor([rank, -rank])).tolist() == [3, -3]
        assert accelerator.reduce(torch.tensor([rank > 0, False]), "max").tolist() == [True, False]
        said.append(message_of(lambda: accelerator.reduce(torch.ones(1) * 1j, "max")))
        said.append(message_of(lambda: accelerator.reduce(torch.ones(rank + 1))))
        sent = accelerator.broadcast({"seed": 5, "w": torch.arange(3)} if rank == 1 else None, src=1)
        assert sent["seed"] == 5
        assert sent["w"].tolist() == [0, 1, 2]
        said.append(message_of(lambda: accelerator.broadcast((_ for _ in ()) if rank == 0 else None)))
        said.append(message_of(lambda: accelerator.broadcast(1, src=3)))

        assert accelerator.gather(torch.tensor(rank)).tolist() == [0, 1, 2]  # everybody is still in step
        return {"said": said, "loss": mean["loss"]}

    results = launch(check, num_processes=WORLD, device="cpu")
    assert len({result["loss"] for result in results}) == 1
    assert results[0]["loss"] == (0.1 + 0.2 + 0.1 * 3) / 3
    for result in results:
        assert result["said"] == results[0]["said"]
    keys, shapes, kinds, bits, columns, parts, text, order, sizes, generator, src = results[0]["said"]
    assert "'b' is a number on rank 0 and 2, missing on rank 1" in keys
    assert "'a' is a float32 tensor of shape [1] on rank 0, a float32 tensor of shape [2] on rank 1" in shapes
    assert "'a' on rank 2 is 'text' of type str" in kinds
    assert "'a' on rank 2 is an int of 1329 bits: use a float" in bits
    assert "value is a float32 tensor of shape [*, 1] on rank 0, a float32 tensor of shape [*, 2] on rank 1" in columns
    assert "value[1] is missing on rank 0, a float32 tensor of shape [*] on rank 1 and 2" in parts
    assert "value on rank 0 is a str: make it a tensor" in text
    assert "value is complex, and complex numbers are not ordered" in order
    assert "value is a float32 tensor of shape [1] on rank 0" in sizes
    assert "rank 0's value could not be sent: TypeError: cannot pickle 'generator' object" in generator
    assert "src=3: must be an integer from 0 to 2" in src


# ------------------------------------------------------------------ training
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def trained(every: int, batch_size: int, precision: str = "no") -> dict[str, torch.Tensor]:
    """Two passes over 24 samples; the same for every number of ranks and batches per step."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(48.0).reshape(24, 2) / 48)
    loader = DataLoader(data, batch_size, shuffle=True)
    accelerator = Accelerator(
        compute_setup="cpu",
        gradient_accumulation_steps=every,
        mixed_precision=precision,
        seed=3,
    )
    schedule = StepLR(optimizer, 2, gamma=0.5)
    loader, schedule, [optimizer], model = accelerator.prepare(loader, schedule, [optimizer], net)
    synced = 0
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                if every > 1 and not accelerator.sync_gradients:
                    own: Any = net.layer.weight.grad
                    assert not torch.equal(accelerator.reduce(own), own)  # not exchanged in between
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            synced += accelerator.sync_gradients
    assert synced == 2 * 24 // (every * batch_size * accelerator.world_size)
    assert accelerator.unwrap_model(model) is net
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def test_training_is_that_of_one_process(launch: Launcher) -> None:
    def check(folder: str) -> Any:
        results = {"plain": trained(1, 4), "accumulated": trained(4, 1), "bf16": trained(1, 4, "bf16")}
        results["fp16"] = trained(1, 4, "fp16")

        # --- what prepare makes of modules
        accelerator = Accelerator(compute_setup="cpu", ddp_kwargs={"find_unused_parameters": True})
        net, frozen = Net(), nn.BatchNorm1d(2, affine=False)
        model, still, loss = accelerator.prepare(net, frozen.requires_grad_(False), nn.MSELoss())
        assert isinstance(model, DistributedDataParallel)
        assert model.find_unused_parameters
        assert still is frozen
        assert isinstance(loss, nn.MSELoss)
        assert accelerator.prepare({"again": model})["again"] is model
        both = accelerator.prepare([net, net])
        assert both[0] is both[1]
        assert accelerator.unwrap_model(torch.compile(nn.DataParallel(model))) is net

        # --- the main process alone, and first
        out = io.StringIO()
        with redirect_stdout(out):
            accelerator.print("hello", accelerator.rank)
        path = Path(folder) / "model.pt"
        with accelerator.main_process_first():
            was_there = path.exists()
            accelerator.save(net.state_dict(), path)
            assert path.exists()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            path.unlink()
        try:  # the others go on where the first fails
            with accelerator.main_process_first():
                if accelerator.is_main_process:
                    raise LookupError
        except LookupError:
            pass
        return {**results, "printed": out.getvalue(), "was_there": was_there}

    folder = os.environ["NBLAUNCH_STATE_DIR"]
    results = launch(check, args=(folder,), device="cpu")
    alone = trained(1, 8)
    for result in results:
        for name in ("plain", "accumulated", "bf16", "fp16"):
            tolerance: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if name.endswith("16") else {}
            torch.testing.assert_close(result[name], alone, **tolerance)
    for name in ("plain", "accumulated", "bf16"):
        assert all(torch.equal(results[0][name][key], results[1][name][key]) for key in alone)
    assert [result["printed"] for result in results] == ["hello 0\n", ""]
    assert [result["was_there"] for result in results] == [False, True]


# ------------------------------------------------------------------ data
def test_loaders_are_shared_out_and_each_sample_counts_once(launch: Launcher) -> None:
    def check() -> Any:
        accelerator = Accelerator(compute_setup="cpu", dtype=torch.float64)
        counts = {}
        for samples, batch_size in ((7, 2), (1, 4), (5, 1), (12, 3)):
            data = TensorDataset(torch.arange(samples), torch.arange(float(samples)))
            loader = accelerator.prepare(DataLoader(data, batch_size))
            came = []
            for index, value in loader:
                assert value.dtype == torch.float64
                came += accelerator.gather_for_metrics({"index": index})["index"].tolist()
            assert accelerator.gather_for_metrics(torch.ones(1)).tolist() == [1.0, 1.0]  # outside of any pass
            counts[samples, batch_size] = came
        # --- a repeated sample's loss is left out, and a pass within another counts by itself
        outer, inner = accelerator.prepare(
            DataLoader(TensorDataset(torch.arange(3)), 1), DataLoader(TensorDataset(torch.arange(3)), 1)
        )
        nested = []
        for _ in outer:
            nested.append(sum(len(accelerator.gather_for_metrics(x.sum())) for (x,) in inner))
        for (_,) in inner:
            if inner.is_last:  # on rank 1 it is padding
                break
        assert accelerator.gather_for_metrics(torch.ones(1)).tolist() == [1.0, 1.0]
        return counts, nested

    for counts, nested in launch(check, device="cpu"):
        assert all(sorted(came) == list(range(samples)) for (samples, _), came in counts.items())
        assert nested == [3, 3]


def test_a_group_that_the_users_code_made_is_used(launch: Launcher) -> None:
    def check() -> Any:
        torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("gloo")
        return Accelerator(compute_setup="cpu").gather(torch.ones(1)).tolist()

    assert list(launch(check, device="cpu")) == [[1.0, 1.0]] * 2
