"""What the notebooks of several files train."""

from __future__ import annotations

from tests.conftest import LONG

TRAINS = """
def train(rank, steps=10_000, go=None):
    import math, os, time
    print("begun", flush=True)
    for step in progress(range(steps), desc="epoch 0"):
        time.sleep(0.02)
        report(step=step, accuracy=1 - math.exp(-step / 50) / 2, loss=math.exp(-step / 40))
        if step in (0, 20, 40, 60):
            print(f"step {step}: loss {math.exp(-step / 40):.4f}", flush=True)
        while go and step == 60 and not os.path.exists(go):
            time.sleep(0.02)
    return rank
"""
"""It prints so little that the panel still shows each line, however late a page looks, and waits for the file `go`."""
GRACE = 20 * LONG
"""Seconds for ``stop_grace``: what ends within LONG after a click has obeyed it, or was killed by the second."""
