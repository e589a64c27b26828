"""`time_workers` and `preprocess` in real ranks: timings of all ranks, and results shared through a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from nblaunch.training.data import Preprocessed, preprocess, shard, time_workers
from tests.processes.conftest import Launcher


def test_ranks_share_what_fresh_processes_made_and_measure_together(launch: Launcher, tmp_path: Path) -> None:
    scale = 3

    class Numbers(Dataset[int]):  # nowhere to import from: fresh processes get it by value
        def __len__(self) -> int:
            return 33

        def __getitem__(self, index: int) -> int:
            return index

    def work(path: Path) -> Any:
        if dist.get_rank() == 0:
            with mock.patch("torch.cuda.is_initialized", return_value=True):  # after which none may be forked
                made = preprocess(Numbers(), lambda n: torch.full((1000,), n * scale), processes=1, path=path)
            assert len(made) == 33
        dist.barrier()
        ready = Preprocessed.open(path)
        loader = shard(DataLoader(ready, batch_size=1))
        timings = time_workers(loader, (0, 1), step=lambda batch: dist.all_reduce(batch), warm_up=0)
        return ready, ready.results[:, 0].tolist(), timings

    results = launch(work, args=(tmp_path / "numbers.pt",))
    (sent, rows, timings), (_, others_rows, others_timings) = results
    assert rows == others_rows == [number * scale for number in range(33)]
    assert sent.results.shape == (33, 1000)  # by its name: the notebook reads the same file
    assert timings == others_timings
    assert [timing.samples for timing in timings.values()] == [33, 33]  # a padding batch is no sample
