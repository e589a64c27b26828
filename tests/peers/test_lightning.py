"""lightning in a launch: ranks found in torchrun's environment variables, with the panel's logger."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from tests.peers.conftest import GOOD, STEPS, TEST_IMAGES, TRAINING_IMAGES
from tests.processes.conftest import Launcher


# ------------------------------------------------------------------ what ranks run
def trained_by_lightning(package: str, its_own_group: bool) -> dict[str, Any]:
    """One epoch on the digits by a module as lightning's own tutorial has it."""
    import importlib

    pl: Any = importlib.import_module(package)
    from nblaunch.training import Accuracy, evaluate
    from nblaunch.training.peers import PanelLogger

    class Digits(pl.LightningModule):  # of either package
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 64), torch.nn.ReLU())
            self.head = torch.nn.Linear(64, 10)
            self.seen = 0

        def forward(self, images: Any) -> Any:
            return self.head(self.net(images))

        def training_step(self, batch: Any, index: int) -> Any:
            self.seen += len(batch[0])
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("valid_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    if its_own_group:
        dist.destroy_process_group()
    before = dist.group.WORLD
    train, test = (datasets.MNIST("data", train=part, transform=transforms.ToTensor()) for part in (True, False))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=1,
        logger=PanelLogger(),
        log_every_n_steps=4,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=64))
    accuracy = Accuracy()
    figures = evaluate(model, DataLoader(test, batch_size=64), metrics=accuracy)
    return {
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "place": (trainer.global_rank, trainer.world_size),
        "is the group from before": dist.group.WORLD is before,
        "steps": trainer.global_step,
        "seen": model.seen,
        "counted": accuracy.count,
        "weights": model.head.weight.sum().item(),
        "checkpoint": trainer.checkpoint_callback.best_model_path,
        **figures,
    }


# ------------------------------------------------------------------ the tests
@pytest.mark.parametrize(
    ("package", "its_own_group"),
    [("lightning.pytorch", False), ("pytorch_lightning", True)],
    ids=["our-group", "its-own-group"],
)
# lightning 2.6 uses what torch 2.15 deprecates
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
# lightning advises more DataLoader workers than this machine has cores, for data that is in memory
@pytest.mark.filterwarnings("ignore:The .*dataloader.* does not have many workers")
@pytest.mark.filterwarnings("ignore:The .srun. command is available")  # tests/engines need it
# its advice to log with sync_dist=True what it cannot know to be alike
@pytest.mark.filterwarnings("ignore:It is recommended to use .self.log.*sync_dist=True")
def test_lightning_trains_on_two_ranks(
    package: str, its_own_group: bool, launch: Launcher, readers_folder: Path
) -> None:
    result = launch(trained_by_lightning, args=(package, its_own_group))
    for rank, came in enumerate(result):
        assert came["environment"] == "TorchElasticEnvironment"
        assert came["place"] == (rank, 2)
        assert came["is the group from before"] is not its_own_group
        assert came["steps"] == STEPS
        assert came["seen"] == TRAINING_IMAGES // 2
        assert came["counted"] == TEST_IMAGES
        assert came["accuracy"] > GOOD
        assert Path(came["checkpoint"]).is_file()
    assert result[0]["weights"] == result[1]["weights"]
    assert result[0]["accuracy"] == result[1]["accuracy"]
    logged = [report for report in result.metrics if report.step is not None]
    bars = [json.loads(line) for line in result.logs[1].out.with_suffix(".spool").read_text().splitlines()]
    ended = {bar["progress"]: (bar["done"], bar["total"], bar["level"]) for bar in bars if "progress" in bar}
    assert ended["training"] == (STEPS, STEPS, 0)
    assert ended["validating"] == (2, 2, 1)
    assert {report.rank for report in logged} == {0}
    assert [report.step for report in logged if "train_loss" in report.values] == [3, 7]
    assert [report.step for report in logged if "valid_loss" in report.values] == [7]


@pytest.mark.parametrize(("name", "package"), [("PanelCallback", "transformers"), ("PanelLogger", "lightning")])
def test_a_missing_library_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nblaunch.training import peers

    monkeypatch.delitem(vars(peers), name, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"{package} is not installed: pip install {package}"):
        getattr(peers, name)


@pytest.mark.parametrize("name", ["PanelCallback", "PanelLogger"])
def test_one_made_in_a_notebook_can_be_sent_to_ranks(name: str) -> None:
    from nblaunch.training import peers

    kind = getattr(peers, name)
    assert kind is getattr(peers, name)
    copy = pickle.loads(pickle.dumps(kind(all_ranks=True)))
    assert (type(copy), copy.all_ranks) == (kind, True)
