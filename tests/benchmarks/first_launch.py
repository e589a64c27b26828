"""The first launch of a process that has imported torch, in times of ``python -c "import torch"``. Alternating medians.

Usage: python -m tests.benchmarks.first_launch [ROUNDS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

LAUNCH = """
import time
import torch
from nblaunch import notebook_launcher
begin = time.perf_counter()
notebook_launcher(abs, (1,), 2, device="cpu", view="none")
print(time.perf_counter() - begin)
"""


def main(rounds: int) -> None:
    imports, launches = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imports.append(time.perf_counter() - begin)
        done = subprocess.run([sys.executable, "-c", LAUNCH], check=True, stdout=subprocess.PIPE, text=True)
        launches.append(float(done.stdout))
    one, other = statistics.median(launches), statistics.median(imports)
    print(f"first launch {one:.2f} s, import of torch {other:.2f} s: {one / other:.2f} times; {rounds} rounds")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
