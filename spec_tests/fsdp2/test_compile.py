"""``torch.compile`` on a sharded model, on its blocks, and inside them.

The backends used here run the captured graphs unchanged ("eager"), or split them into forward and backward first
("aot_eager"). Both would reveal an all-gather that was captured in a graph. The results must be bitwise equal to those
of the uncompiled model, and equal blocks must share one graph.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import tqdm
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from spec_tests.harness import ranks
from spec_tests.models.modules import Block, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import sharded
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FSDPModule, fully_shard

pytestmark = pytest.mark.not_simulated("the compiler would trace the simulation itself")


def fresh() -> None:
    """Clears the compile caches; torch's progress bars share a lock that would outlive a rank."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tqdm.tqdm.set_lock(threading.RLock())


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def trained(model: Any, called: Any = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final values of three steps, which call ``called`` instead of the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(iterate(model if called is None else called, step))
        optimizer.step()
    return losses, full_values(model)


def assert_same_training(ours: tuple[list[float], Any], expected: tuple[list[float], Any]) -> None:
    assert ours[0] == expected[0]
    assert_same(ours[1], expected[1], bitwise=True)


@pytest.mark.spec("TRAIN-25")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@ranks(2, timeout=120)
def test_a_compiled_model_trains_like_an_eager_one(backend: str) -> None:
    fresh()
    expected = trained(sharded())
    model = sharded()
    assert_same_training(trained(model, torch.compile(model, backend=backend)), expected)
    assert num_graphs() >= 1


@pytest.mark.spec("TRAIN-25")
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@ranks(2, timeout=120)
def test_equal_blocks_that_are_compiled_in_place_share_one_graph(reshard_after_forward: bool | None) -> None:
    fresh()
    options = {"reshard_after_forward": reshard_after_forward}
    expected = trained(sharded(**options))
    model = seeded()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    assert_same_training(trained(sharded(model, **options)), expected)
    assert num_graphs() == 1


@pytest.mark.spec("TRAIN-25")
@pytest.mark.parametrize("comes_first", ["compile", "fully_shard"])
@ranks(2, timeout=120)
def test_a_block_may_be_wrapped_by_the_compiler_before_or_after_it_is_sharded(comes_first: str) -> None:
    fresh()
    expected = trained(sharded())
    model = seeded()
    for index, block in enumerate(model.blocks):
        if comes_first == "compile":
            model.blocks[index] = fully_shard(torch.compile(block, backend="aot_eager"))
        else:
            model.blocks[index] = torch.compile(fully_shard(block), backend="aot_eager")
    losses, values = trained(fully_shard(model))
    assert_same_training((losses, {name.replace("_orig_mod.", ""): value for name, value in values.items()}), expected)
    assert num_graphs() >= 1


@pytest.mark.spec("TRAIN-25")
@ranks(2, timeout=120)
def test_a_compiled_block_may_be_checkpointed() -> None:
    fresh()
    expected = trained(sharded())
    model = seeded()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
        model.blocks[index].compile(backend="aot_eager")
    losses, values = trained(sharded(model))
    prefix = "_checkpoint_wrapped_module."
    assert_same_training((losses, {name.replace(prefix, ""): value for name, value in values.items()}), expected)


@pytest.mark.spec("TRAIN-25")
@ranks(2, timeout=120)
def test_fullgraph_compilation_of_a_unit_gives_one_graph() -> None:
    fresh()
    plain, model = seeded(Block), seeded(Block)
    model.compile(backend="aot_eager", fullgraph=True)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    for step in range(2):
        output = model(batch(step))
        assert torch.equal(output, plain(batch(step)))
        loss_of(output).backward()
    assert num_graphs() == 1
