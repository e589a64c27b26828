"""Lines of a script that restore the notebook's random states, and its defaults of torch."""

from __future__ import annotations

import ast
import random
import re
from typing import Any

from nblaunch.machine.packages import package_of
from nblaunch.wire.messages import Settings


def defaults(settings: Settings) -> list[str]:
    """Return lines that set torch's defaults as in the notebook."""
    lines = []
    flags = settings.flags
    if str(flags.get("default dtype", "torch.float32")) != "torch.float32":
        lines.append(f"torch.set_default_dtype({flags['default dtype']})")
    if flags.get("matmul precision", "highest") != "highest":
        lines.append(f'torch.set_float32_matmul_precision("{flags["matmul precision"]}")')
    is_deterministic, warn_only = flags.get("deterministic", (False, False))
    if is_deterministic:
        lines.append(f"torch.use_deterministic_algorithms(True, warn_only={warn_only})")
    lines += [f"torch.backends.{name} = True" for name in ("cudnn.deterministic", "cudnn.benchmark") if flags.get(name)]
    return lines


def packages_in(code: str) -> set[str]:
    """Return the top-level packages that code imports, also in functions."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {package_of(name) for name in names}


def random_states(
    settings: Settings, code: str, saved_name: str, saved: dict[str, Any], modules: set[str]
) -> list[str]:
    """Return lines that restore the notebook's random states. Their data is added to `saved`.

    Under torchrun each rank would have random states of its own. Those of Python and NumPy are restored if the code
    may use them.

    Args:
        settings: The notebook's.
        code: The script's code.
        saved_name: The script's name for `saved`.
        saved: What is saved beside the script.
        modules: The modules that the lines need are added to it.
    """
    import torch

    lines = []
    if settings.torch_seed is not None and settings.torch_rng is not None:
        lines.append(f"torch.manual_seed({settings.torch_seed})  # as in the notebook")
        state = torch.get_rng_state()
        if not torch.equal(state, torch.Generator().manual_seed(settings.torch_seed).get_state()):
            saved["torch's random state"] = state
            lines.append(f'torch.set_rng_state({saved_name}["torch\'s random state"])')
    packages = packages_in(code)
    if "random" in packages:
        saved["Python's random state"] = random.getstate()
        lines.append(f'random.setstate({saved_name}["Python\'s random state"])')
        modules.add("random")
    state = settings.numpy_rng
    if "numpy" in packages and re.search(r"\brandom\b", code) and state:
        kind, keys, *rest = state
        if kind == "MT19937":
            saved["NumPy's random state"] = torch.from_numpy(keys.astype("int64"))
            key = f'{saved_name}["NumPy\'s random state"].numpy()'
            lines.append(f'numpy.random.set_state(("MT19937", {key}, {", ".join(map(repr, rest))}))')
            modules.add("numpy")
    return lines
