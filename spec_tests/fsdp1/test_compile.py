"""``torch.compile`` around a wrapped model, inside a wrapped model, and in cases that are refused.

The backends used here either run the captured graphs unchanged ("eager") or split them into forward and backward first
("aot_eager"). Both are fast. Both would expose an all-gather that was captured in a graph, or a view that was looked up
too early, because the numbers must be bitwise equal to those of the uncompiled model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import tqdm
from torch import Tensor, nn

from spec_tests.checkpoint.refusals import caught_warnings, refused
from spec_tests.harness import ranks
from spec_tests.models.modules import Block, seeded
from spec_tests.models.running import iterate
from spec_tests.models.sharding import FLAT_STRATEGIES, FULL_SHARD, NO_SHARD, wrapped
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy

FSDP = FullyShardedDataParallel
pytestmark = pytest.mark.not_simulated("torch.compile does not know the simulated device")


def trained(model: FSDP, called: Any = None, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Trains for a few steps and returns the losses and final values. Calls ``called`` instead of the model if set."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(iterate(model if called is None else called, step))
        optimizer.step()
    return losses, full_values(model)


class Compiler:
    """A backend that counts the operations in the graphs it receives. Creating one drops all earlier compilations."""

    def __init__(self, backend: str = "eager") -> None:
        torch._dynamo.reset()
        # torch reports progress with tqdm, whose default lock is shared between processes and would outlive a rank.
        tqdm.tqdm.set_lock(threading.RLock())
        self.backend, self.num_operations = backend, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.num_operations += sum(node.op.startswith("call_") for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)


def assert_same_training(ours: tuple[list[float], Any], expected: tuple[list[float], Any]) -> None:
    assert ours[0] == expected[0]
    assert_same(ours[1], expected[1], bitwise=True)


@pytest.mark.spec("ORIG-07")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2, timeout=120)
def test_with_original_parameters_a_compiled_model_trains_like_an_eager_one(strategy: ShardingStrategy) -> None:
    options = {"use_orig_params": True, "sharding_strategy": strategy}
    expected = trained(wrapped(**options))
    compiler, model = Compiler(), wrapped(**options)
    with caught_warnings() as caught:
        assert_same_training(trained(model, torch.compile(model, backend=compiler)), expected)
    assert not any("torch.compile" in str(warning.message) for warning in caught)
    assert compiler.num_operations >= 2, "the blocks have been compiled"


@pytest.mark.spec("ORIG-07")
@ranks(2, timeout=120)
def test_a_compiled_backward_gives_the_same_gradients() -> None:
    expected = trained(wrapped(use_orig_params=True))
    compiler, model = Compiler("aot_eager"), wrapped(use_orig_params=True)
    assert_same_training(trained(model, torch.compile(model, backend=compiler)), expected)
    assert compiler.num_operations >= 2


@pytest.mark.spec("ORIG-07")
@ranks(2, timeout=120)
def test_compiling_with_flat_parameters_warns_once_and_trains() -> None:
    expected = trained(wrapped())
    model = wrapped()
    with caught_warnings() as caught:
        found = trained(model, torch.compile(model, backend=Compiler()))
    said = [str(warning.message) for warning in caught if "torch.compile" in str(warning.message)]
    assert len(said) == 1
    assert "use_orig_params=True" in said[0]
    assert_same_training(found, expected)


def in_place_after(compiler: Compiler, options: dict[str, Any]) -> FSDP:
    model = wrapped(**options)
    for wrapper in FSDP.fsdp_modules(model)[1:]:
        wrapper.module.compile(backend=compiler)
    return model


def in_place_before(compiler: Compiler, options: dict[str, Any]) -> FSDP:
    plain = seeded()
    for block in plain.blocks:
        block.compile(backend=compiler)
    return wrapped(plain, **options)


def each_block_by_hand(compiler: Compiler, options: dict[str, Any]) -> FSDP:
    plain = seeded()
    for index, block in enumerate(plain.blocks):
        plain.blocks[index] = FSDP(torch.compile(block, backend=compiler), **options)
    return FSDP(plain, **options)


@pytest.mark.spec("ORIG-07")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("build", [in_place_after, in_place_before, each_block_by_hand])
@ranks(2, timeout=120)
def test_compiled_modules_inside_units_train_like_eager_ones(build: Callable[..., FSDP], use_orig_params: bool) -> None:
    options = {"use_orig_params": use_orig_params}
    losses, values = trained(wrapped(**options))
    compiler = Compiler()
    found, named = trained(build(compiler, options))
    assert found == losses
    assert_same({name.replace("_orig_mod.", ""): value for name, value in named.items()}, values, bitwise=True)
    assert compiler.num_operations >= 2


@pytest.mark.spec("ORIG-07", "WRAP-15")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@ranks(2, timeout=120)
def test_policy_refuses_modules_that_were_compiled_before(strategy: ShardingStrategy) -> None:
    def blocks() -> Iterator[nn.Module]:
        for block in seeded().blocks:
            yield torch.compile(block, backend="eager")

    # The compiled module bypasses the wrapper, so with NO_SHARD the gradients would not be reduced.
    with refused(ValueError, "Block at '0'", "torch.compile", "module.compile()"):
        FSDP(nn.Sequential(*blocks()), auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy=strategy)
