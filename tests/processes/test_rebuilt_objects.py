"""Objects of the table of reducers in real ranks: torch's operators of the notebook."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.processes.conftest import Launcher


@pytest.mark.filterwarnings("ignore:.torch.jit.trace.*is deprecated:FutureWarning")
def test_ranks_have_the_operators_that_code_names(launch: Launcher) -> None:
    @torch.library.custom_op("rebuilt::scale", mutates_args=())
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @scale.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    scale.register_autograd(lambda context, gradient: gradient * 5)

    @torch.library.triton_op("rebuilt::add", mutates_args={})
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.ops.rebuilt.scale(x)

    net, packet, one = Net(), torch.ops.rebuilt.scale, torch.ones(1)
    graph, program = torch.fx.symbolic_trace(net), torch.export.export(net, (one,))
    script = torch.jit.trace(net, one)

    def by_name() -> Any:
        x = torch.ones(1, requires_grad=True)
        whole = torch.compile(net, backend="eager", fullgraph=True)
        (whole(x) + torch.ops.rebuilt.add(x).detach()).sum().backward()
        return x.grad

    def by_object(*made: Any) -> list[float]:
        called = (each.module() if hasattr(each, "graph_signature") else each for each in made)
        return [float(each(one)) for each in called]

    (gradient,) = launch(by_name, num_processes=1)
    assert gradient.tolist() == [5.0]
    for made in ((graph,), (program,), (script,), (packet,), (scale, add)):
        assert launch(by_object, made, num_processes=1)[0] == [2.0] * len(made)
