"""Claims about whole scripts and how they are started, about DDP around FSDP, and about ``torch.compile``."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import symtable
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import tqdm
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import minifsdp
from minifsdp import checkpoint_wrapper
from spec_tests.harness import device, ranks
from spec_tests.models.modules import Block, Nested, seeded
from spec_tests.models.running import batch, iterate
from spec_tests.models.sharding import as_torch, grid, sharded, wrapped
from spec_tests.oracles.counting import count_collectives
from spec_tests.subject import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    transformer_auto_wrap_policy,
)

FSDP: Any = FullyShardedDataParallel
FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
T5 = (TUTORIALS / "t5_summarise.py").read_text(encoding="utf-8")


# --- DDP ---


def dicts_through_ddp(library: Any, model: torch.nn.Module, *, init_sync: bool) -> list[dict[str, Any]]:
    """The full and the sharded state dict."""
    outer = DistributedDataParallel(model, init_sync=init_sync)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for form in (library.StateDictType.FULL_STATE_DICT, library.StateDictType.SHARDED_STATE_DICT):
            with library.FullyShardedDataParallel.state_dict_type(outer, form):
                found.append(outer.state_dict())
    return found


@pytest.mark.spec("MYTH-28")
@pytest.mark.parametrize("ours", [True, False], ids=["minifsdp", "torch"])
@ranks(2)
def test_state_dicts_are_dispatched_through_a_ddp_around_the_wrapper(ours: bool) -> None:
    library, make = (minifsdp, wrapped) if ours else (torch_fsdp, as_torch)
    expected = {f"module.{name}": value for name, value in seeded().state_dict().items()}
    full, in_parts = dicts_through_ddp(library, make(seeded()), init_sync=False)
    assert list(full) == list(in_parts) == list(expected)
    assert all(torch.equal(full[name], value) for name, value in expected.items())
    assert not any(type(value) is torch.Tensor for value in in_parts.values())
    # By default, DDP broadcasts the shards of rank 0 to all ranks.
    overwritten, _ = dicts_through_ddp(library, make(seeded()), init_sync=True)
    assert not any(torch.equal(overwritten[name], expected[name]) for name in expected if name.endswith("weight"))


@pytest.mark.spec("MYTH-28")
@pytest.mark.parametrize("api", ["wrapper", "original", "function"])
@ranks(4)
def test_training_through_a_ddp_around_a_sharded_model_is_refused(api: str) -> None:
    row, column = grid()
    if api == "function":
        model = sharded(mesh=DeviceMesh.from_group(row, device().type))
    else:
        model = wrapped(process_group=row, use_orig_params=api == "original")
    refusal = r"(?s)inside a DistributedDataParallel.*HYBRID_SHARD.*E-ddp-around"
    if api == "function":
        # The constructor reads an attribute of the model, which raises the error.
        with pytest.raises(RuntimeError, match=refusal):
            DistributedDataParallel(model, process_group=column, init_sync=False)
        return
    outer = DistributedDataParallel(model, process_group=column, init_sync=False)
    with pytest.raises(RuntimeError, match=refusal):
        outer(batch())
    with torch.no_grad():
        assert torch.isfinite(outer(batch())).all()


@pytest.mark.spec("MYTH-28")
@ranks(2)
def test_ddp_may_ignore_the_sharded_parameters() -> None:
    model = seeded()
    expected = DistributedDataParallel(seeded())
    expected(batch()).square().mean().backward()
    model.blocks[0] = FSDP(model.blocks[0], device_id=device())
    alone = [name for name, _ in model.named_parameters() if name.startswith("blocks.0.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, alone)
    outer = DistributedDataParallel(model)
    outer(batch()).square().mean().backward()
    assert torch.allclose(model.leave.weight.grad, expected.module.leave.weight.grad, atol=1e-6)
    assert model.blocks[0].module.linear.weight.grad is None


@pytest.mark.spec("MYTH-28")
@ranks(4)
def test_ddp_over_other_ranks_may_ignore_the_sharded_parameters() -> None:
    """Broken: parameters that DDP ignores are refused like parameters that DDP reduces."""
    row, column = grid()
    by_rows, by_columns = (DistributedDataParallel(seeded(), process_group=group) for group in (row, column))
    model = seeded()
    model.blocks[0] = FSDP(model.blocks[0], process_group=row, use_orig_params=True, device_id=device())
    alone = [name for name, _ in model.named_parameters() if name.startswith("blocks.0.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, alone)
    for whole in (by_rows, by_columns, DistributedDataParallel(model, process_group=column)):
        whole(batch()).square().mean().backward()
    assert torch.allclose(model.leave.weight.grad, by_columns.module.leave.weight.grad, atol=1e-6)
    with FSDP.summon_full_params(model, with_grads=True):
        gradient = model.blocks[0].linear.weight.grad
    assert torch.allclose(gradient, by_rows.module.blocks[0].linear.weight.grad, atol=1e-6)


@pytest.mark.spec("MYTH-28")
@ranks(4)
def test_a_hybrid_strategy_shards_in_pairs_and_replicates_the_pairs() -> None:
    model = wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=grid())
    replicated = DistributedDataParallel(seeded())
    with count_collectives() as counts:
        iterate(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    iterate(replicated, optimizer=torch.optim.SGD(replicated.parameters(), lr=0.1))
    assert counts.calls["reduce_scatter"] == counts.calls["all_reduce"] == 5
    expected = replicated.module.state_dict()
    assert all(torch.allclose(value, expected[name], atol=1e-6) for name, value in model.state_dict().items())


# --- torch.compile ---


def nested() -> torch.nn.Module:
    """A block in the middle of the root. It has no loop, because the compiler skips a root with a loop."""
    return seeded(lambda: Nested(6, 4))


def num_graphs(model: torch.nn.Module) -> int:
    """The number of graphs that the compiler gets in a step."""
    num = 0

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal num
        num += 1
        return graph

    torch._dynamo.reset()
    # Torch shows progress with tqdm, whose default lock is shared by processes and would outlive a rank.
    tqdm.tqdm.set_lock(threading.RLock())
    compiled = torch.compile(model, backend=backend)
    compiled(batch()).square().mean().backward()
    return num


@pytest.mark.spec("MYTH-54")
@pytest.mark.not_simulated("the compiler would trace the simulation itself")
@ranks(2)
def test_torch_compiles_only_with_original_params() -> None:
    # The three graphs are the block, and the root's layers before it and after it. A warning would be an error here.
    assert num_graphs(as_torch(nested())) == 0
    assert num_graphs(as_torch(nested(), use_orig_params=True)) == 3


@pytest.mark.spec("MYTH-54")
@pytest.mark.not_simulated("the compiler would trace the simulation itself")
@ranks(2)
def test_compiling_without_original_parameters_gives_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"torch\.compile needs use_orig_params=True"):
        num_graphs(wrapped(nested()))
    assert num_graphs(wrapped(nested(), use_orig_params=True)) == 3


# --- the script of the T5 tutorial ---


def undefined_names(source: str) -> set[str]:
    """Global names that a script uses, including in annotations, but does not define."""
    top = symtable.symtable(source.replace("from __future__ import annotations", ""), "script", "exec")
    bound = {name.get_name() for name in top.get_symbols() if name.is_assigned() or name.is_imported()}
    scopes, used = [top], set()
    for scope in scopes:
        scopes += scope.get_children()
        used |= {
            name.get_name()
            for name in scope.get_symbols()
            if name.is_referenced() and (name.is_global() or scope is top)
        }
    return used - bound - set(dir(builtins)) - {"__name__"}


def imports_of(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    found = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return [node for node in found if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]


@pytest.mark.spec("MYTH-73")
def test_script_on_the_page_defines_or_imports_every_used_name() -> None:
    assert undefined_names(T5) == set()
    assert T5.index("\nPOLICIES =") < T5.index("POLICIES[")
    assert undefined_names("def gigabytes(size):\n    return size / GIGABYTE\n") == {"GIGABYTE"}
    for number, node in enumerate(imports_of(ast.parse(T5))):
        without = ast.parse(T5)
        without.body.remove(imports_of(without)[number])
        assert undefined_names(ast.unparse(without)) == {
            alias.asname or alias.name.split(".")[0] for alias in node.names
        }


@pytest.mark.spec("MYTH-73")
def test_old_checkpointing_name_is_available_only_here() -> None:
    assert not hasattr(torch_checkpoint_wrapper, "apply_activation_checkpointing_wrapper")
    assert hasattr(checkpoint_wrapper, "apply_activation_checkpointing_wrapper")
    wanted = [
        (node.module, alias.name)
        for node in imports_of(ast.parse(T5))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("torch", "minifsdp"))
        for alias in node.names
    ]
    assert ("minifsdp.checkpoint_wrapper", "apply_activation_checkpointing") in wanted
    assert [(module, name) for module, name in wanted if not hasattr(importlib.import_module(module), name)] == []


def shard_of_t5(without: str, **names: Any) -> Any:
    """The script's function ``shard`` with globals ``names``, and without the keyword argument ``without``."""
    [function] = [node for node in ast.parse(T5).body if isinstance(node, ast.FunctionDef) and node.name == "shard"]
    for call in ast.walk(function):
        if isinstance(call, ast.Call):
            call.keywords = [keyword for keyword in call.keywords if keyword.arg != without]
    exec(compile(ast.Module([function], []), "t5_summarise.py", "exec"), names)
    return names["shard"]


@pytest.mark.spec("MYTH-82")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_units_have_the_given_strategy_or_full_shard(strategy: ShardingStrategy) -> None:
    def strategies(without: str = "") -> set[ShardingStrategy]:
        shard = shard_of_t5(
            without,
            FSDP=FSDP,
            T5Block=Block,
            ShardingStrategy=ShardingStrategy,
            BackwardPrefetch=BackwardPrefetch,
            choose_policy=lambda _: None,
            functools=functools,
            transformer_auto_wrap_policy=transformer_auto_wrap_policy,
        )
        options = SimpleNamespace(strategy=strategy.name, precision=None, model=None, checkpoint_activations=False)
        units = FSDP.fsdp_modules(shard(seeded(), options, SimpleNamespace(device=device())))
        assert len(units) == 5
        return {unit.sharding_strategy for unit in units}

    assert strategies() == {strategy}
    assert strategies(without="sharding_strategy") == {FULL_SHARD}
    # The default of torch is the same.
    assert as_torch(seeded()).sharding_strategy is torch_fsdp.ShardingStrategy.FULL_SHARD


# --- how ranks are started ---


def place_of(rank: int, local_rank: int, patch: pytest.MonkeyPatch) -> Any:
    """The rank and device that the tutorials use on one of two machines with 8 GPUs each."""
    patch.syspath_prepend(str(TUTORIALS))
    for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 16, "LOCAL_WORLD_SIZE": 8}.items():
        patch.setenv(name, str(value))
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 8)
    for module, name in [
        (torch.cuda, "set_device"),
        (importlib.import_module("gpt.ranks"), "store_of_this_start"),
        (dist, "init_process_group"),
        (dist, "barrier"),
        (dist, "destroy_process_group"),
    ]:
        patch.setattr(module, name, mock.Mock())
    patch.setattr(dist, "rendezvous", mock.Mock(return_value=iter([(dist.HashStore(), rank, 16)])))
    places: list[Any] = []
    importlib.import_module("common").on_ranks(places.append)
    torch.cuda.set_device.assert_called_once_with(places[0].device)  # type: ignore[attr-defined]
    return places[0]


@pytest.mark.spec("MYTH-77")
def test_the_device_is_chosen_by_the_rank_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(9, 1, monkeypatch)
    assert place.rank == 9
    # Neither machine has ten GPUs, so the global rank 9 is not a device index.
    assert place.device == torch.device("cuda", 1)


@pytest.mark.spec("MYTH-77")
def test_device_index_equals_the_rank_on_the_first_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(1, 1, monkeypatch)
    assert place.device == torch.device("cuda", place.rank)


@pytest.mark.spec("MYTH-81")
def test_launcher_determines_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of(9, 1, monkeypatch).num_ranks == 16


@pytest.mark.spec("MYTH-81")
@ranks(4)
def test_apis_shard_over_ranks_without_number_of_gpus() -> None:
    apis: list[Any] = [FSDP, fully_shard, torch_fsdp.FullyShardedDataParallel, torch_fsdp.fully_shard]
    for api in apis:
        assert not [name for name in inspect.signature(api).parameters if "gpu" in name]
        with pytest.raises(TypeError, match="gpus"):
            api(seeded(), gpus=2)
    for model in (wrapped(), as_torch(seeded())):
        # A block has 42 elements, and the root 56.
        assert sorted(p.numel() for p in model.parameters()) == [11, 11, 11, 11, 14]
