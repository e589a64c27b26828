"""The plan of a launch, on fake machines."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from typing import Any

import numpy
import pytest

from nblaunch.engines.local import LocalEngine
from nblaunch.errors import ArgumentError
from nblaunch.launch.options import Options
from nblaunch.launch.plan import Plan, make_plan
from nblaunch.machine.inventory import Machine, this_machine


def machine(gpus: int = 0, cpus: int = 8, platform: str = "linux", **env: Any) -> Machine:
    return Machine(gpus, cpus, platform, env)


def planned(on: Machine | None = None, **arguments: Any) -> Plan:
    on = on or machine()
    return make_plan([on], LocalEngine(on.platform), Options(**arguments))


def environment_of(plan: Plan, rank: int = 0, attempt: int = 0) -> dict[str, str]:
    return plan.environment(rank, ("127.0.0.1", 4242), "the-id", attempt)


# ------------------------------------------------------------------ arguments that are wrong
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("num_processes", True, "must be an integer, at least 1"),
        ("max_restarts", None, "must be an integer, at least 0"),
        ("threads_per_rank", "4", "must be an integer, at least 1"),
        ("timeout", "1m", "must be a positive number of seconds"),
        ("stop_grace", float("inf"), "must be a positive number of seconds"),
        *(("device", value, "must be one of 'auto', 'cpu', 'cuda'") for value in ("tpu", None, ["cpu"])),
        *(("backend", value, "must be one of 'gloo', 'nccl',") for value in ("smoke", "")),
        ("start_method", "forked", "must be one of 'auto', 'forkserver', 'spawn', 'fork'"),
        *(("mixed_precision", value, "must be one of 'no', 'fp16', 'bf16', 'fp8'") for value in ("half", None)),
        ("env", "A=1", "must be a dict of strings"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(name: str, value: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(f'{name}={value!r}: {says}')}"):
        planned(**{name: value})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"BATCH": 32}, "env={'BATCH': 32}: names and values must be strings"),
        ({5: "a"}, "env={5: 'a'}: names and values must be strings"),
        ({"": "a"}, "env={'': 'a'}: empty, or contains '=' in the name or NUL"),
        ({"A=B": "a"}, "env={'A=B': 'a'}: empty, or contains '='"),
        ({"A": "a\0"}, r"env={'A': 'a\x00'}: empty, or contains '='"),
        ({"RANK": "3"}, "env={'RANK': '3'}: nblaunch sets this variable for each rank"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "env={'TORCHELASTIC_RUN_ID': 'x'}: nblaunch sets this variable for each rank"),
    ],
)
def test_an_environment_that_cannot_be_is_named_by_the_variable(env: dict[Any, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        planned(env={"FINE": "1", **env})


def test_numpys_integers_are_numbers_of_processes() -> None:
    assert planned(num_processes=numpy.int64(3)).world_size == 3


def test_windows_gets_one_sentence_that_points_to_wsl() -> None:
    with pytest.raises(ArgumentError, match=r"^nblaunch runs on Linux and macOS; on Windows, .* inside WSL 2$"):
        planned(machine(platform="win32"))


# ------------------------------------------------------------------ ranks, devices, backend
@pytest.mark.parametrize(
    ("gpus", "arguments", "ranks", "devices", "backend"),
    [
        (0, {}, 2, ["cpu", "cpu"], "gloo"),
        (4, {}, 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "cpu:gloo,cuda:nccl"),
        (4, {"num_processes": 2}, 2, ["cuda:0", "cuda:1"], "cpu:gloo,cuda:nccl"),
        (4, {"device": "cpu"}, 2, ["cpu", "cpu"], "gloo"),
        (2, {"backend": "nccl"}, 2, ["cuda:0", "cuda:1"], "nccl"),
        (2, {"num_processes": 3, "backend": "gloo"}, 3, ["cuda:0", "cuda:1", "cuda:0"], "gloo"),
        (1, {"num_processes": 3, "device": "cpu"}, 3, ["cpu"] * 3, "gloo"),
    ],
)
def test_ranks_devices_and_backend_follow_the_gpus(
    gpus: int, arguments: dict[str, Any], ranks: int, devices: list[str], backend: str
) -> None:
    plan = planned(machine(gpus), **arguments)
    assert (plan.world_size, plan.backend) == (ranks, backend)
    assert [place.device for place in plan.places] == devices


def test_more_ranks_than_free_descriptors_are_refused() -> None:
    small = Machine(0, 8, "linux", {}, free_descriptors=1024)
    assert planned(small, num_processes=248).world_size == 248
    with pytest.raises(
        ArgumentError,
        match=r"^num_processes=249 needs about 1,026 file descriptors in the kernel, but only 1,024 are free \(ulim",
    ):
        planned(small, num_processes=249)


def test_the_soft_limit_of_descriptors_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_NOFILE: (512, 4096)}[kind])
    before = this_machine().free_descriptors
    assert 0 < before < 510
    with open(os.devnull):
        assert this_machine().free_descriptors == before - 1
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert this_machine().free_descriptors == 1 << 20


@pytest.mark.parametrize(
    ("gpus", "arguments", "message"),
    [
        (
            1,
            {"num_processes": 3},
            "num_processes=3, but 1 GPU is visible: use num_processes=1, or device='cpu', or backend='gloo' to let "
            "ranks share a GPU",
        ),
        (2, {"num_processes": 3, "device": "cuda"}, "num_processes=3, but 2 GPUs are visible: use num_processes=2, or"),
        (
            0,
            {"device": "cuda"},
            "device='cuda', but no GPU is visible: check CUDA_VISIBLE_DEVICES, or",
        ),
        (0, {"backend": "nccl"}, "backend='nccl' needs GPUs, but the device is 'cpu': use backend='gloo'"),
    ],
)
def test_too_many_ranks_for_the_gpus_are_refused_with_alternatives(
    gpus: int, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        planned(machine(gpus), **arguments)


# ------------------------------------------------------------------ start methods
def test_where_forking_is_unsafe_ranks_are_spawned() -> None:
    with pytest.raises(ArgumentError, match=r"^start_method='forkserver': must be one of 'auto', 'spawn', 'fork'$"):
        planned(machine(platform="darwin"), start_method="forkserver")
    assert LocalEngine("darwin").usable("auto", {}, ()) == "spawn"


# ------------------------------------------------------------------ threads
@pytest.mark.parametrize(
    ("cpus", "ranks", "inherited", "arguments", "threads"),
    [
        (8, 2, {}, {}, 4),
        (8, 3, {}, {}, 2),
        (2, 8, {}, {}, 1),
        (8, 2, {"OMP_NUM_THREADS": "3"}, {}, 3),
        (8, 2, {"OMP_NUM_THREADS": "5,2"}, {}, 5),
        (8, 2, {"OMP_NUM_THREADS": "0"}, {}, 4),
        (8, 2, {"OMP_NUM_THREADS": "²"}, {}, 4),
        (8, 2, {"OMP_NUM_THREADS": "3"}, {"threads_per_rank": 7}, 7),
        (8, 2, {"OMP_NUM_THREADS": "3"}, {"env": {"OMP_NUM_THREADS": "6"}}, 6),
    ],
)
def test_threads_are_the_callers_or_the_users_or_a_share_of_the_cpus(
    cpus: int, ranks: int, inherited: dict[str, Any], arguments: dict[str, Any], threads: int
) -> None:
    plan = planned(machine(cpus=cpus, **inherited), num_processes=ranks, **arguments)
    assert plan.places[0].threads == threads
    assert environment_of(plan)["OMP_NUM_THREADS"] == str(threads)


# ------------------------------------------------------------------ environment
HOSTILE: dict[str, Any] = dict.fromkeys(
    [
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
        *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NBLAUNCH_RANK", "NBLAUNCH_LAUNCH_ID"),
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
    ],
    "another's",
)


def test_nothing_of_another_launchs_environment_reaches_a_rank() -> None:
    environment = environment_of(planned(machine(**HOSTILE, HOME="/home/me")), rank=1)
    assert not {name for name, value in HOSTILE.items() if environment.get(name) == value}
    assert "NODE_RANK" not in environment
    assert not [name for name in environment if name.startswith("SLURM_")]  # lightning would take its rank from there
    assert environment["HOME"] == "/home/me"


def test_the_users_own_nccl_error_handling_is_kept_as_by_torchrun() -> None:
    plan = planned(machine(TORCH_NCCL_ASYNC_ERROR_HANDLING="3"))
    assert environment_of(plan)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


@pytest.mark.parametrize(("platform", "interface"), [("linux", "lo"), ("darwin", "lo0")])
def test_ranks_talk_over_loopback_unless_the_call_says_otherwise(platform: str, interface: str) -> None:
    on = machine(platform=platform)
    assert planned(on).env["GLOO_SOCKET_IFNAME"] == planned(on).env["NCCL_SOCKET_IFNAME"] == interface
    assert planned(on, env={"GLOO_SOCKET_IFNAME": "eth0"}).env["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(
    ("backend", "seen"),
    [
        ("module://matplotlib_inline.backend_inline", "module://nblaunch.ranks.matplotlib_backend"),
        ("module://ipympl.backend_nbagg", "module://nblaunch.ranks.matplotlib_backend"),
        ("agg", "agg"),
    ],
)
def test_a_backend_that_only_a_kernel_can_draw_with_is_replaced(backend: str, seen: str) -> None:
    assert planned(machine(MPLBACKEND=backend)).env["MPLBACKEND"] == seen


@pytest.mark.parametrize(("own", "kept"), [("ray.util.rpdb.set_trace", None), ("ipdb.set_trace", "ipdb.set_trace")])
def test_rays_breakpoint_is_not_the_ranks(own: str, kept: str | None) -> None:
    assert planned(machine(PYTHONBREAKPOINT=own)).env.get("PYTHONBREAKPOINT") == kept


def test_several_nodes_each_place_their_own_ranks() -> None:
    two, four = (Machine(gpus, 8, "linux", {}, name=f"n{gpus}", interface="eth0") for gpus in (2, 4))
    plan = make_plan([two, four], LocalEngine())
    assert plan.world_size == 6
    assert [(p.node, p.local_rank, p.local_world_size, p.device, p.host) for p in plan.places][1:4] == [
        (0, 1, 2, "cuda:1", "n2"),
        (1, 0, 4, "cuda:0", "n4"),
        (1, 1, 4, "cuda:1", "n4"),
    ]
    assert plan.ranks == [range(2), range(2, 6)]
    env = plan.environment(3, ("10.0.0.1", 4242), "the-id", 0)
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("1", "2", "4")
    assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"]) == ("10.0.0.1", "eth0")
    assert [place.threads for place in plan.places] == [4, 4, 2, 2, 2, 2]


def test_nodes_that_cannot_work_together_are_named() -> None:
    gpu, cpu = Machine(2, 8, "linux", {}, name="gpu1"), Machine(0, 8, "linux", {}, name="cpu1")
    with pytest.raises(ArgumentError, match=r"^device='auto': cpu1 has no GPU, but other nodes do"):
        make_plan([gpu, cpu], LocalEngine())
    with pytest.raises(ArgumentError, match=r"^device='cuda', but no GPU is visible on cpu1"):
        make_plan([gpu, cpu], LocalEngine(), Options(device="cuda"))
    with pytest.raises(ArgumentError, match=r"^num_processes=3, but 2 GPUs are visible on gpu1: use num_processes=2"):
        make_plan([gpu, gpu], LocalEngine(), Options(num_processes=3))
    assert make_plan([gpu, cpu], LocalEngine(), Options(device="cpu")).world_size == 2  # one on each


def test_accelerates_cpu_variable_is_set_for_cpu_ranks() -> None:
    assert planned(device="cpu").env["ACCELERATE_USE_CPU"] == "true"
    assert planned(machine(ACCELERATE_USE_CPU="no"), device="cpu").env["ACCELERATE_USE_CPU"] == "no"
    assert "ACCELERATE_USE_CPU" not in planned(machine(gpus=1), num_processes=1).env


@pytest.mark.parametrize(("precision", "seen"), [("no", None), ("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "fp8")])
def test_accelerates_mixed_precision_variable_is_set(precision: str, seen: str | None) -> None:
    assert planned(mixed_precision=precision).env.get("ACCELERATE_MIXED_PRECISION") == seen


# ------------------------------------------------------------------ the machine
def test_a_machine_without_gpu_drivers_needs_no_torch() -> None:
    code = (
        "import ctypes, sys\n"
        "from nblaunch.machine import inventory\n"
        "inventory._CUDA_DRIVER, inventory._GPU_DEVICES = 'libcuda.so.0', ()\n"
        "print(inventory.this_machine().gpus, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", str(sys.platform != "linux")]
