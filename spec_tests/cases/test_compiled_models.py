"""``torch.compile`` around a sharded model, inside it, and in cases that are refused.

The backends used here either run the captured graphs unchanged ("eager") or split them into forward and backward first
("aot_eager"). Both would expose an all-gather that was captured in a graph, or a view that was looked up too early,
because the numbers must be bitwise equal to those of the uncompiled model. Equal blocks must share one graph.
"""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tqdm
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils import cpp_extension

from spec_tests.harness import ranks
from spec_tests.models import apis, modules, running, sharding
from spec_tests.models.values import full_values
from spec_tests.subject import FSDPModule, FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, fully_shard

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = ShardingStrategy
pytestmark = pytest.mark.not_simulated("the compiler would trace the simulation itself")


def fresh() -> None:
    """Clears the compile caches; torch's progress bars share a lock that would outlive a rank."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tqdm.tqdm.set_lock(threading.RLock())


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def trained(model: Any, called: Any = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final values of three steps, which call ``called`` instead of the model if it is given."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [running.iterate(model if called is None else called, step, optimizer) for step in range(3)]
    values = full_values(model)
    prefixes = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
    return losses, {prefixes.sub("", name): value for name, value in values.items()}


@pytest.mark.api_spec(wrapper=["ORIG-07", "MYTH-54"], fully_shard=["TRAIN-25"])
@pytest.mark.parametrize(
    ("api", "strategy", "backend"),
    [
        (apis.WRAPPED, FULL_SHARD, "eager"),
        (apis.ORIGINALS, FULL_SHARD, "aot_eager"),
        (apis.ORIGINALS, SHARD_GRAD_OP, "eager"),
        (apis.ORIGINALS, NO_SHARD, "eager"),
        (apis.FULLY_SHARD, FULL_SHARD, "eager"),
        (apis.FULLY_SHARD, FULL_SHARD, "aot_eager"),
    ],
    ids=apis.name_of,
)
@ranks(2, timeout=120)
def test_a_compiled_model_trains_like_an_eager_one(api: apis.Api, strategy: Any, backend: str) -> None:
    expected = trained(api.shard(strategy=strategy))
    fresh()
    model = api.shard(strategy=strategy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(model, torch.compile(model, backend=backend))
    texts = [str(warning.message) for warning in caught if "torch.compile" in str(warning.message)]
    assert ["use_orig_params=True" in text for text in texts] == ([True] if api == apis.WRAPPED else [])
    assert_equal(found, expected)
    assert num_graphs() >= 1


@pytest.mark.api_spec(wrapper=["ORIG-07"], fully_shard=["TRAIN-25"])
@pytest.mark.parametrize("how", ["compile in place", "new module"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before sharding", "after sharding"])
@apis.all_apis
@ranks(2, timeout=120)
def test_compiled_blocks_train_like_eager_ones(api: apis.Api, is_before: bool, how: str) -> None:
    def compiled(block: Any) -> Any:
        if how == "new module":
            return torch.compile(block, backend="aot_eager")
        # In place, a wrapper is not compiled, but the block inside.
        getattr(block, "module", block).compile(backend="aot_eager")
        return block

    expected = trained(api.shard())
    fresh()
    model = modules.seeded()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = api.unit(compiled(block)) if is_before else compiled(api.unit(block))
    assert_equal(trained(api.unit(model)), expected)
    assert num_graphs() >= 1


@pytest.mark.spec("TRAIN-25")
@pytest.mark.parametrize(
    ("reshard_after_forward", "is_checkpointed"), [(True, False), (False, False), (None, False), (None, True)]
)
@ranks(2, timeout=120)
def test_equal_blocks_that_are_compiled_in_place_share_one_graph(
    reshard_after_forward: bool | None, is_checkpointed: bool
) -> None:
    options = {"reshard_after_forward": reshard_after_forward}
    expected = trained(sharding.sharded(**options))
    fresh()
    plain = modules.seeded()
    for index, block in enumerate(plain.blocks):
        plain.blocks[index] = checkpoint_wrapper(block) if is_checkpointed else block
        plain.blocks[index].compile(backend="aot_eager")
    assert_equal(trained(sharding.sharded(plain, **options)), expected)
    assert is_checkpointed or num_graphs() == 1


@pytest.mark.api_spec(wrapper=["ORIG-07"], fully_shard=["TRAIN-25"])
@pytest.mark.parametrize(
    ("api", "is_before"),
    [(apis.ORIGINALS, True), (apis.FULLY_SHARD, False)],
    ids=["wrapper, before", "fully_shard, after"],
)
@ranks(2, timeout=240)
def test_checkpointed_blocks_that_inductor_compiles_train_like_plain_ones(
    api: apis.Api, is_before: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The compiler does not quote the folder of torch's libraries, which may have a space.
    link = tmp_path / f"torch-of-rank-{dist.get_rank()}"
    link.symlink_to(Path(torch.__file__).parent)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(link / "lib"))
    # Otherwise the compiler starts processes.
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    fresh()
    losses, _ = trained(api.shard())
    model = modules.seeded()
    for index, block in enumerate(model.blocks):
        checkpointed = checkpoint_wrapper(block)
        if is_before:
            checkpointed.compile(backend="inductor")
        model.blocks[index] = api.unit(checkpointed)
        if not is_before:
            model.blocks[index].compile(backend="inductor")
    found, _ = trained(api.unit(model))
    # Inductor fuses operations, so sums have another order: within 50 roundings of float32.
    assert found == pytest.approx(losses, rel=50 * torch.finfo(torch.float32).eps)
    assert num_graphs() >= 1


@pytest.mark.spec("TRAIN-25")
@ranks(2, timeout=120)
def test_fullgraph_compilation_of_a_unit_gives_one_graph() -> None:
    fresh()
    plain, model = modules.seeded(modules.Block), modules.seeded(modules.Block)
    model.compile(backend="aot_eager", fullgraph=True)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    for step in range(2):
        output = model(running.batch(step))
        assert torch.equal(output, plain(running.batch(step)))
        running.loss_of(output).backward()
    assert num_graphs() == 1


@pytest.mark.spec("ORIG-07", "WRAP-15")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@ranks(2, timeout=120)
def test_policy_refuses_modules_that_were_compiled_before(strategy: ShardingStrategy) -> None:
    blocks = [torch.compile(block, backend="eager") for block in modules.seeded().blocks]
    # The compiled module bypasses the wrapper, so with NO_SHARD the gradients would not be reduced.
    with pytest.raises(ValueError, match=r"(?s)Block at '0'.*torch\.compile.*module\.compile\(\)"):
        FullyShardedDataParallel(
            nn.Sequential(*blocks), auto_wrap_policy=ModuleWrapPolicy({modules.Block}), sharding_strategy=strategy
        )


@pytest.mark.spec("MYTH-54", "ORIG-07")
@ranks(2, timeout=120)
def test_with_original_parameters_the_compiler_gets_each_part() -> None:
    fresh()
    # A block in the middle of the root. It has no loop, because the compiler skips a root with a loop.
    model = sharding.wrapped(modules.seeded(lambda: modules.Nested(6, 4)), use_orig_params=True)
    running.iterate(torch.compile(model, backend="eager"))
    # The block, and the root's layers before it and after it. A warning would be an error here.
    assert num_graphs() == 3
