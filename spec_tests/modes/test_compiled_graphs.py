"""What ``torch.compile`` compiles of a model in the wrapper: nothing, unless the parameters keep their names."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import tqdm

from spec_tests.harness import ranks
from spec_tests.models.modules import Nested, seeded
from spec_tests.models.running import batch
from spec_tests.models.sharding import wrapped

pytestmark = pytest.mark.not_simulated("the compiler would trace the simulation itself")


def num_graphs(model: torch.nn.Module) -> int:
    """The number of graphs that the compiler gets in a step."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    # Torch shows progress with tqdm, whose default lock is shared by processes and would outlive a rank.
    tqdm.tqdm.set_lock(threading.RLock())
    torch.compile(model, backend=backend)(batch()).square().mean().backward()
    return len(graphs)


@pytest.mark.spec("MYTH-54", "ORIG-07")
@ranks(2)
def test_compiling_without_original_parameters_gives_a_warning() -> None:
    # A block in the middle of the root. It has no loop, because the compiler skips a root with a loop.
    model = wrapped(seeded(lambda: Nested(6, 4)))
    with pytest.warns(UserWarning, match=r"torch\.compile needs use_orig_params=True"):
        num_graphs(model)


@pytest.mark.spec("MYTH-54", "ORIG-07")
@ranks(2)
def test_with_original_parameters_the_compiler_gets_each_part() -> None:
    model = wrapped(seeded(lambda: Nested(6, 4)), use_orig_params=True)
    # The block, and the root's layers before it and after it. A warning would be an error here.
    assert num_graphs(model) == 3
