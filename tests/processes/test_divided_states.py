"""`save_state`, `load_state` and the Trainer with models that the ranks divide."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nblaunch.errors import ArgumentError, CollectiveError
from nblaunch.training import Accelerator, Accuracy, Parallelism, TrainConfig, Trainer
from nblaunch.training.parallelism import full_state, is_sharded, unwrapped
from tests.processes.conftest import Launcher
from tests.processes.test_parallelism import TIED_PLAN, Model, loss_of, sentences

pytestmark = pytest.mark.usefixtures("imported_ahead")

SHARDED = Parallelism()
LAYERS = Parallelism(tensor=2, plan=TIED_PLAN)
BATCHES = 5


class Dropping(nn.Module):
    """Its ranks must draw the same numbers in a tensor group, and go on with them after a resume."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = Model(seed, tied=True, layers=1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.inner(tokens))
        return output


def plan_of(how: Parallelism | None) -> Parallelism | None:
    """Return how to divide a `Dropping`."""
    if how is None or how.plan is None:
        return how
    return Parallelism(shard=how.shard, tensor=how.tensor, plan={f"inner.{name}": at for name, at in how.plan.items()})


class Loop:
    """A training loop of a single model, with everything that a state holds."""

    def __init__(self, how: Parallelism | None, seed: int, drops: bool = True) -> None:
        self.accelerator = Accelerator(compute_setup="cpu", parallelism=plan_of(how), seed=5)
        self.model = Dropping(seed)
        self.model.dropout.p = 0.2 if drops else 0.0
        torch.manual_seed(seed + self.accelerator.rank)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        parts = self.accelerator.world_size // self.accelerator.copies
        loader = DataLoader(sentences(24), 4 // parts, shuffle=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.scheduler, self.net, self.optimizer, self.loader = self.accelerator.prepare(
            scheduler, self.model, optimizer, loader
        )

    def step(self, batches: int) -> None:
        """Train on the next batches of this pass, and leave the pass."""
        for number, (inputs, target) in enumerate(self.loader, 1):
            self.accelerator.backward(loss_of(self.net(inputs), target))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            if number == batches:
                return

    def whole(self) -> list[Any]:
        """Return the state on rank 0."""
        weights = self.accelerator.get_state_dict(self.net)
        own = copy.deepcopy(full_state(self.optimizer))
        if self.accelerator.rank:
            assert own == {}
            assert weights == {} or not any(map(is_sharded, self.model.parameters()))
        return [
            {name: value.clone() for name, value in weights.items()},
            own,
            self.scheduler.state_dict()["last_epoch"],
        ]


def saves(folder: Path, how: Parallelism | None, drops: bool = True) -> list[Any]:
    """Save within a pass, train on, and return the states at both times."""
    loop = Loop(how, 0, drops)
    loop.accelerator.save_state(folder / "new")  # before the first step the optimizer has no state
    for number, (inputs, target) in enumerate(loop.loader, 1):
        loop.accelerator.backward(loss_of(loop.net(inputs), target))
        loop.optimizer.step()
        loop.scheduler.step()
        loop.optimizer.zero_grad()
        if number == 2:
            loop.accelerator.save_state(folder / "later")
            saved = loop.whole()
        if number == BATCHES:
            break
    return [saved, loop.whole(), torch.rand(1)]


def loads(folder: Path, how: Parallelism | None, drops: bool = True) -> list[Any]:
    loop = Loop(how, 3, drops)
    loop.step(1)  # its own state is to be forgotten
    loop.accelerator.load_state(folder / "new")
    assert loop.whole()[1].get("state", {}) == {}
    loop.accelerator.load_state(folder / "later")
    loaded = loop.whole()
    loop.step(BATCHES - 2)
    return [loaded, loop.whole(), torch.rand(1)]


def same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_equal_ranks_resume_to_the_same_bits(on_ranks: Launcher, tmp_path: Path) -> None:
    """Within a pass, with dropout."""

    def both(how: Parallelism) -> list[Any]:
        folder = tmp_path / f"saved{how.tensor}"
        return [saves(folder, how), loads(folder, how)]

    for ranks, how in ((2, SHARDED), (4, LAYERS)):
        for (saved, ended, drawn), (loaded, resumed, again) in on_ranks(partial(both, how), ranks):
            same([loaded, resumed, again], [saved, ended, drawn])


def test_other_ranks_divide_what_was_saved(launch: Launcher, on_ranks: Launcher, tmp_path: Path) -> None:
    """From shards, divided layers and whole models to each other, and to one process."""
    others: dict[int, list[tuple[int, Parallelism | None]]] = {
        2: [(1, None), (2, LAYERS), (3, SHARDED)],
        4: [(2, None), (4, Parallelism(replicate=2))],
    }
    for before, first in ((2, SHARDED), (4, LAYERS)):
        folder = tmp_path / f"saved{before}"
        saved, ended, _ = on_ranks(partial(saves, folder, first, False), before)[0]
        for ranks, how in others[before]:
            run = partial(loads, folder, how, False)
            if ranks == 1:
                loaded, resumed, _ = run()
            else:
                result = launch(run, num_processes=3, device="cpu") if ranks == 3 else on_ranks(run, ranks)
                loaded, resumed, _ = result[0]
            same(loaded, saved)
            if ranks != 3:  # whose batches have another size
                same(resumed, ended, 1e-10)


# ------------------------------------------------------------------ what fails
def test_gradients_of_a_step_that_broke_off_are_dropped(on_ranks: Launcher, tmp_path: Path) -> None:
    def run(precision: str) -> list[bool]:
        accelerator = Accelerator(
            compute_setup="cpu", parallelism=SHARDED, gradient_accumulation_steps=2, mixed_precision=precision
        )
        net = accelerator.prepare(Model(0, dtype=torch.float32))
        accelerator.save_state(tmp_path / precision)
        inputs, target = sentences(4).tensors
        gradients: list[list[Any]] = []
        for batches in (2, 1, 2):
            for _ in range(batches):
                with accelerator.accumulate(net):
                    accelerator.backward(loss_of(net(inputs), target))
            gradients.append([None if part.grad is None else part.grad.full_tensor() for part in net.parameters()])
            accelerator.load_state(tmp_path / precision)
        first, unfinished, again = gradients
        assert unfinished == [None] * len(first)
        return [torch.equal(*pair) for pair in zip(first, again, strict=True)]

    def both() -> list[bool]:
        return run("no") + run("bf16")

    assert all(on_ranks(both)[0])


def test_a_rank_that_gathers_alone_names_the_call(launch: Launcher) -> None:
    def check(rank: int) -> None:
        accelerator = Accelerator(compute_setup="cpu", parallelism=SHARDED)
        net = accelerator.prepare(nn.Linear(4, 4))
        if rank == 0:
            accelerator.get_state_dict(net)

    said = "rank 1 finished while rank 0 waited in get_state_dict: every rank must make"
    with pytest.raises(CollectiveError, match=said):
        launch(check, device="cpu")


def test_an_optimizer_of_two_models_is_saved_with_both(on_ranks: Launcher, tmp_path: Path) -> None:
    def run(save: bool) -> list[Any]:
        accelerator = Accelerator(compute_setup="cpu", parallelism=SHARDED if save else None)
        torch.manual_seed(save)
        first, second = nn.Linear(3, 3), nn.Linear(3, 2)
        inner = torch.optim.Adam([*second.parameters(), *first.parameters()])
        one, other, optimizer = accelerator.prepare(first, second, inner)
        if save:
            one(torch.ones(2, 3)).sum().backward()  # the other one has no state
            optimizer.step()
            accelerator.save_state(tmp_path / "pair")
        else:
            accelerator.load_state(tmp_path / "pair")
        return [full_state(one), full_state(other), full_state(optimizer)]

    saved = on_ranks(partial(run, True))[0]
    same(run(False), saved)
    assert saved[2]["state"].keys() == {2, 3}


def test_whole_states_load_into_divided_models(on_ranks: Launcher, tmp_path: Path) -> None:

    def run(folder: Path) -> list[Any]:
        loop = Loop(SHARDED, 0)
        loop.step(1)
        loop.accelerator.load_state(folder / "whole")
        assert all(map(is_sharded, loop.model.parameters()))
        return loop.whole()

    alone = Loop(None, 1)
    alone.step(2)
    alone.accelerator.save_state(tmp_path / "whole")
    same(on_ranks(partial(run, folder=tmp_path))[0], alone.whole())


# ------------------------------------------------------------------ Trainer
class Raises:
    """A callback that ends all ranks at one step."""

    def on_step_end(self, trainer: Trainer, loss: Tensor) -> None:
        if trainer.step == 5:
            raise OSError("a disk has gone")


def trainer(how: Parallelism | None, ranks: int, callbacks: tuple[object, ...] = (), **config: Any) -> Trainer:
    model = Model(0, tied=True, layers=1)
    parts = ranks if how is None else ranks // how.tensor
    given = {
        "epochs": 2,
        "batch_size": 8 // parts,
        "log_every": 2,
        "max_grad_norm": 1.0,
        "schedule": "cosine",
        **config,
    }
    return Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.02),
        TrainConfig(nprocs=ranks, compute_setup="cpu", parallelism=how, **given),
        loss_fn=loss_of,
        metrics={"accuracy": Accuracy()},
        callbacks=callbacks,
    )


def figures(one: Trainer, data: Any) -> list[Any]:
    """Return the trained states, and what the model says of other data."""
    weights, own = full_state(one.model), full_state(one.optimizer)
    return [
        {name: value.clone() for name, value in weights.items()},
        copy.deepcopy(own),
        one.validate(data),
        one.predict(data),
        [{name: value for name, value in results.items() if name != "seconds"} for results in one.history],
    ]


def fits(how: Parallelism | None, ranks: int, folder: Path) -> list[Any]:
    """Train without a break and with one, in these ranks, and restore the best step."""
    train, valid = sentences(26), sentences(5)
    whole = trainer(how, ranks)
    whole.fit(train, valid)
    config: Any = {"checkpoint_dir": folder, "checkpoint_every": 2, "monitor": "valid_loss"}
    broken = trainer(how, ranks, (Raises(),), **config)
    with pytest.raises(OSError, match="a disk has gone"):
        broken.fit(train, valid)
    resumed = trainer(how, ranks, **config)
    resumed.fit(train, valid)
    results = [figures(whole, valid), figures(resumed, valid)]
    best = resumed.restore_best()
    return [*results, best.value, resumed.validate(valid)["valid_loss"]]


def test_a_trainer_divides_the_model_and_resumes(on_ranks: Launcher, tmp_path: Path) -> None:
    whole, resumed, best, _ = fits(None, 1, tmp_path / "alone")
    same(resumed, whole)
    for ranks, how in ((2, SHARDED), (4, LAYERS)):
        folder = tmp_path / f"ranks{ranks}"
        own, again, value, restored = on_ranks(partial(fits, how, ranks, folder), ranks)[0]
        same(again, own)
        same(own, whole, 1e-10)
        assert value == restored == pytest.approx(best)
        one = trainer(None, 1)
        one.load(folder)  # whole, in one file
        same([one.model.state_dict(), one.optimizer.state_dict()], own[:2])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
def test_a_notebook_gets_the_whole_model(tmp_path: Path) -> None:
    """A compiled one, whose state has other names."""
    one, alone = trainer(SHARDED, 2, checkpoint_dir=tmp_path, epochs=1), trainer(None, 1)
    for each in (one, alone):
        compiled: Any = torch.compile(each.model, backend="eager")
        each.model = compiled
    model, optimizer = one.fit(sentences(26))
    assert not any(map(is_sharded, model.parameters()))
    saved = torch.load(next(tmp_path.glob("step-*.pt")))
    same(unwrapped(model).state_dict(), saved["model"][0])
    same(optimizer.state_dict(), saved["optimizer"][0])
    alone.load(tmp_path, progress=False)
    same(one.predict(sentences(5)), alone.predict(sentences(5)), 1e-12)


def test_another_tensor_size_cannot_resume(tmp_path: Path) -> None:
    trainer(SHARDED, 2, checkpoint_dir=tmp_path, max_steps=1).fit(sentences(26))
    with pytest.raises(ArgumentError, match="was written with tensor=1, but this run has tensor=2"):
        trainer(LAYERS, 2, checkpoint_dir=tmp_path, max_steps=2, batch_size=4).fit(sentences(26))
