"""Spawned DataLoader workers in ranks, with datasets and functions defined in cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.kernel.harness import Kernel

DEFINITIONS = """
import os
import numpy as np
import torch
from dataclasses import dataclass
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset

SCALE = 10
prepared_in = None

@dataclass
class Settings:
    offset: int

class Batch(list):
    def scaled(self):
        return scaled(1)

class Odd(Exception):
    pass

class Base(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.made(index)

class DS(Base):
    class Kind:
        name = "kind"

    def __init__(self, size, settings):
        super().__init__(size)
        self.settings = settings
        self.steps = [scaled, lambda number: number + self.settings.offset, Adds(1)]
        self.owner = lambda: self
        self.kind = DS.Kind()

    def made(self, index):
        assert self.owner() is self  # no copy of the dataset beside it
        number = np.int64(index)
        for step in self.steps:
            number = step(number)
        if number < 0:
            raise Odd(f"{number}")
        return int(number), self.kind.name, os.getpid(), prepared_in

class Adds:
    def __init__(self, more):
        self.more = more

    def __call__(self, number):
        return number + self.more

class Stream(IterableDataset):
    def __iter__(self):
        yield from (scaled(index) for index in range(4))

def scaled(number):
    return number * SCALE

def collate(items):
    return Batch(items)

def prepare_worker(number):
    global prepared_in
    prepared_in = (number, os.getpid())
"""
CHECKS = """
SCALE = 100  # changed after the definitions, before the launch

def persistent(context):
    indices = list(range(6))
    loader = DataLoader(DS(6, Settings(5)), batch_size=3, sampler=indices, num_workers=1, persistent_workers=True,
                        multiprocessing_context=context, collate_fn=collate, worker_init_fn=prepare_worker)
    epochs = [list(loader), list(loader)]
    assert [[type(batch) is Batch for batch in epoch] for epoch in epochs] == [[True, True]] * 2
    assert [item[0] for batch in epochs[0] for item in batch] == [6, 106, 206, 306, 406, 506]
    assert epochs[0] == epochs[1]  # by the same worker
    global SCALE
    before, SCALE = SCALE, 1000
    assert epochs[0][0].scaled() == 1000  # a batch that came back is of the rank's own class, with its own globals
    SCALE = before
    assert os.getpid() not in {item[2] for batch in epochs[0] for item in batch}
    assert all(item[3][1] == item[2] for batch in epochs[0] for item in batch)  # what its worker_init_fn has set
    indices[:] = [-1]
    try:
        list(loader)
    except Odd as error:
        return "Odd: -94" in str(error)

def composed(context):
    class Local(Base):
        def made(self, index):
            return scaled(index), "local", SCALE, self.size

    parts = ConcatDataset([Subset(DS(6, Settings(0)), [5, 0]), Local(2)])
    loader = DataLoader(parts, batch_size=2, num_workers=1, multiprocessing_context=context,
                        collate_fn=lambda items: [item[:2] for item in items])
    assert list(loader) == [[(501, "kind"), (1, "kind")], [(0, "local"), (100, "local")]]

def streamed(context):
    loader = DataLoader(Stream(), batch_size=4, num_workers=1, multiprocessing_context=context)
    assert [batch.tolist() for batch in loader] == [[0, 100, 200, 300]]

def run(context, rank):
    if rank == 0:  # each rank checks a part: importing torch in workers is most of the time
        return persistent(context)
    return composed(context), streamed(context)
"""

NEWEST = """
def newest():
    loader = DataLoader(Stream(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    return [batch.tolist() for batch in loader]
"""


def test_fresh_workers_know_all_that_the_cells_define(kernel: Kernel) -> None:
    kernel.run(DEFINITIONS).check()
    kernel.run(CHECKS).check()
    launched: Any = kernel.ask("list(notebook_launcher(run, args=('spawn',), num_processes=2, view='none'))")
    assert launched == [True, (None, None)]


def test_fresh_workers_know_what_another_cell_replaced(kernel: Kernel) -> None:
    """A class redefined between two launches is the new one in the workers of the second."""
    kernel.run(DEFINITIONS).check()
    kernel.run(CHECKS).check()
    kernel.run("class Stream(IterableDataset):\n    def __iter__(self):\n        yield from [7, 8]").check()
    kernel.run(NEWEST).check()
    assert kernel.ask("list(notebook_launcher(newest, num_processes=1, view='none'))") == [[[7, 8]]]


BESIDE = """
import sys
before = os.getcwd()
os.chdir({folder!r})
sys.path.insert(0, "")  # as a notebook has it: the folder that it is in
with open("beside_the_notebook.py", "w") as file:
    file.write("class Items(list):\\n    pass\\n")
from beside_the_notebook import Items

def read(context):
    loader = DataLoader(Items([1, 2]), batch_size=2, num_workers=1, multiprocessing_context=context)
    return [batch.tolist() for batch in loader]
"""


def test_fresh_workers_import_modules_from_the_notebooks_folder(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("import os\nfrom torch.utils.data import DataLoader").check()
    kernel.run(BESIDE.format(folder=str(tmp_path))).check()
    try:
        launch = "notebook_launcher(read, args=('forkserver',), num_processes=1, view='none')"
        assert kernel.ask(f"list({launch})") == [[[1, 2]]]
    finally:
        kernel.run("os.chdir(before)\nsys.path.remove('')").check()
