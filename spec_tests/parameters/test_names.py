"""Names of parameters, buffers and modules, and access to the wrapped module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.testing import assert_close

import minifsdp
from spec_tests.harness import device, ranks
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch
from spec_tests.models.sharding import as_torch, wrapped
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy

FSDP = FullyShardedDataParallel
PREFIX = "_fsdp_wrapped_module."


class Named(nn.Module):
    """Has parameters and buffers at every level, a tied parameter, and parameters and buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(6.0))
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.Sequential(*(nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(6))) for _ in range(2)))
        self.leave.weight = self.enter.weight
        self.label = "a plain attribute"

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x + self.table))) * self.own.sum()

    def shout(self, word: str, *, times: int = 1) -> str:
        return word.upper() * times

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)


def named_model(wrapper: Any = FSDP, **options: Any) -> Any:
    """A `Named` with one unit for each block and one around them."""
    model = seeded(Named)
    for index, block in enumerate([*model.blocks]):
        model.blocks[index] = wrapper(block, device_id=device(), **options)
    return wrapper(model, device_id=device(), **options)


def names_of(pairs: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [name for name, _ in pairs]


flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])

# --- the wrapped module ---


@pytest.mark.spec("NAMES-01")
@flat_or_original
@ranks(2)
def test_module_is_the_wrapped_module_itself(keep: bool) -> None:
    plain = seeded()
    blocks = list(plain.blocks)
    model = wrapped(plain, use_orig_params=keep)
    for _ in range(2):
        assert model.module is plain
        assert [wrapper.module for wrapper in plain.blocks] == blocks
        model(batch()).sum().backward()


@pytest.mark.spec("NAMES-08")
@ranks(2)
def test_wrapper_forwards_missing_attributes_to_module() -> None:
    model = named_model()
    plain = model.module
    assert model.label == "a plain attribute"
    assert model.enter is plain.enter
    assert model.table is plain.table
    assert model.shout("a", times=2) == "AA"
    assert model.num_blocks == 2
    assert model.blocks[0] is plain.blocks[0]
    assert model.blocks[0].norm is plain.blocks[0].module.norm, "through two wrappers"
    with pytest.raises(AttributeError, match="nowhere"):
        _ = model.nowhere
    assert not hasattr(model, "nowhere")
    assert getattr(model, "nowhere", 3) == 3


@pytest.mark.spec("NAMES-08")
@ranks(2)
def test_wrapper_hides_no_attributes_that_torchs_wrapper_shows() -> None:
    def public(package: Any) -> set[str]:
        model = package.FullyShardedDataParallel(nn.Linear(4, 4), device_id=device())
        model(torch.ones(2, 4, device=device())).sum().backward()
        return {name for name in dir(model) if not name.startswith("_")}

    assert public(minifsdp) - public(torch_fsdp) == {"params_with_grad"}, "torch 1.13 has it (NAMES-09)"


@pytest.mark.spec("NAMES-08", "SD-FULL-01")
@flat_or_original
@ranks(2)
def test_a_model_may_have_a_mesh_of_its_own(keep: bool) -> None:
    """Defect: the wrapper has an attribute ``mesh``, and uses the value that the program sets there."""
    model = named_model(use_orig_params=keep)
    model.module.mesh = "vertices"
    assert model.mesh == "vertices"
    model.mesh = model.device_mesh = "faces"
    model.load_state_dict(model.state_dict())
    assert_close(model.state_dict(), seeded(Named).state_dict(), rtol=0, atol=0)
    model(batch()).sum().backward()
    assert (model.mesh, model.device_mesh, model.module.mesh) == ("faces", "faces", "vertices")


@pytest.mark.spec("NAMES-08")
@ranks(2)
def test_indexing_goes_to_the_wrapped_module() -> None:
    layers = [nn.Linear(4, 4, device=device()), nn.Tanh(), FSDP(nn.Linear(4, 4, device=device()))]
    model = FSDP(nn.Sequential(*layers))
    assert [model[index] for index in (0, 1, 2, -1)] == [*layers, layers[-1]]
    assert list(model[1:]) == layers[1:]
    with pytest.raises(IndexError, match="out of range"):
        model[3]
    with pytest.raises(TypeError, match="not subscriptable"):
        FSDP(nn.Linear(4, 4, device=device()))[0]


# --- names of parameters and buffers ---


@pytest.mark.spec("NAMES-02", "NAMES-03", "SUMMON-02")
@pytest.mark.parametrize("strategy", [*ShardingStrategy][:3])
@flat_or_original
@ranks(2)
def test_inside_summon_names_are_those_of_the_plain_module(strategy: ShardingStrategy, keep: bool) -> None:
    plain, model = seeded(Named), named_model(sharding_strategy=strategy, use_orig_params=keep)
    for _ in range(2):
        with FSDP.summon_full_params(model):
            for found, expected in (
                ([*model.named_parameters()], [*plain.named_parameters()]),
                ([*model.named_buffers()], [*plain.named_buffers()]),
            ):
                assert names_of(found) == names_of(expected)
                assert [type(tensor) for _, tensor in found] == [type(tensor) for _, tensor in expected]
                assert_close(dict(found), dict(expected), rtol=0, atol=0)
            assert names_of(model.blocks[0].named_parameters()) == ["norm.weight", "norm.bias"]
        assert all(name.startswith(PREFIX) for name, _ in model.named_parameters()), "the names are restored afterwards"
        model.eval()(batch())


@pytest.mark.spec("NAMES-02")
@flat_or_original
@ranks(2)
def test_names_are_still_plain_after_an_inner_summon(keep: bool) -> None:
    parts = [FSDP(nn.Linear(6, 6), use_orig_params=keep, device_id=device()) for _ in range(2)]
    # The outermost wrapper has no parameters of its own, so the inner block may include it as well.
    model = FSDP(nn.Sequential(*parts), use_orig_params=keep, device_id=device())
    with FSDP.summon_full_params(model, recurse=False):
        outer = names_of(model.named_parameters())
        with FSDP.summon_full_params(model):
            assert names_of(model.named_parameters()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert names_of(model.named_parameters()) == outer
        assert not any(name.startswith(PREFIX) for name in outer)


@pytest.mark.spec("NAMES-04")
@flat_or_original
@ranks(2)
def test_names_outside_summon_have_the_prefix_as_in_torch(keep: bool) -> None:
    model, theirs = wrapped(use_orig_params=keep), as_torch(seeded(), use_orig_params=keep)
    names = names_of(model.named_parameters())
    assert names == names_of(theirs.named_parameters())
    own, inner = ("enter.weight", "linear.weight") if keep else ("_flat_param", "_flat_param")
    assert {f"{PREFIX}{own}", f"{PREFIX}blocks.1.{PREFIX}{inner}"} <= set(names)
    model = named_model(use_orig_params=keep)
    assert names_of(model.named_buffers())[:2] == [f"{PREFIX}table", f"{PREFIX}blocks.0.{PREFIX}norm.running_mean"]


ARGUMENTS: list[dict[str, Any]] = [
    {"prefix": "here"},
    {"recurse": False},
    {"remove_duplicate": False},
    {"prefix": "here", "recurse": True, "remove_duplicate": False},
]


@pytest.mark.spec("NAMES-05")
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("listing", ["named_parameters", "named_buffers"])
@flat_or_original
@ranks(2)
def test_arguments_of_named_parameters_and_named_buffers_keep_working(
    listing: str, arguments: dict[str, Any], keep: bool
) -> None:
    def names(module: nn.Module, *given: Any, **keywords: Any) -> list[str]:
        # Sorted, because torch lists the second name of a tied parameter at the end.
        return sorted(name for name, _ in getattr(module, listing)(*given, **keywords))

    plain, model = seeded(Named), named_model(use_orig_params=keep)
    theirs = named_model(torch_fsdp.FullyShardedDataParallel, use_orig_params=keep)
    assert names(model, **arguments) == names(theirs, **arguments)
    assert names(model, "here", False) == names(theirs, "here", False), "by position"
    with FSDP.summon_full_params(model), torch_fsdp.FullyShardedDataParallel.summon_full_params(theirs):
        assert names(model, **arguments) == names(theirs, **arguments)
        assert names(model.module, **arguments) == names(theirs.module, **arguments)
        # The wrapper has no parameters of its own; its wrapped module has them.
        assert names(model, **arguments) == (names(plain, **arguments) if arguments.get("recurse", True) else [])


# --- finding wrappers ---


@pytest.mark.spec("NAMES-06")
@ranks(2)
def test_fsdp_modules_lists_every_wrapper_below() -> None:
    model = wrapped()
    blocks = list(model.blocks)
    assert FSDP.fsdp_modules(model) == [model, *blocks]
    assert FSDP.fsdp_modules(model.module) == blocks, "the module may be plain"
    assert FSDP.fsdp_modules(blocks[1]) == [blocks[1]]
    assert FSDP.fsdp_modules(nn.Linear(2, 2)) == []
    assert model.fsdp_modules(blocks[1]) == [blocks[1]], "the method is static"
    several = nn.ModuleDict({"b": blocks[1], "plain": nn.Linear(2, 2), "again": blocks[1], "a": blocks[0]})
    assert FSDP.fsdp_modules(several) == [blocks[1], blocks[0]], "each once, in the order of modules()"
    model(batch()).sum().backward()
    assert FSDP.fsdp_modules(model) == [model, *blocks]


@pytest.mark.spec("NAMES-07", "CTOR-10")
@pytest.mark.parametrize("has_run", [False, True])
@ranks(2)
def test_root_only_lists_the_roots_and_two_trees_have_two(has_run: bool) -> None:
    trees = [wrapped(), wrapped()]
    if has_run:
        for tree in trees:
            tree(batch()).sum().backward()
    pair = nn.ModuleList([*trees, nn.Linear(2, 2)])
    assert FSDP.fsdp_modules(pair, root_only=True) == trees
    assert FSDP.fsdp_modules(pair, True) == trees
    assert len(FSDP.fsdp_modules(pair)) == 10
    assert FSDP.fsdp_modules(nn.Linear(2, 2), root_only=True) == []
    if has_run:
        assert FSDP.fsdp_modules(trees[0].blocks[1], root_only=True) == []
        assert FSDP.fsdp_modules(trees[0].module, root_only=True) == []


# --- access to the wrapped module ---


@pytest.mark.spec("STATE-01")
@flat_or_original
@ranks(2)
def test_a_hook_that_lists_the_parameters_in_backward_does_not_end_it(keep: bool) -> None:
    model, numbers = wrapped(use_orig_params=keep), []

    def observe(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: numbers.append(len(list(model.parameters()))))

    expected = len(list(model.parameters()))
    model.blocks[1].register_forward_hook(observe)
    assert_trains_like(model)
    assert numbers == [expected]


# --- attributes that libraries read ---


def states_seen(model: Any, block: nn.Module) -> dict[str, list[str]]:
    """For each moment, the states of the root and of one block. ``block`` is the module inside the block's wrapper."""
    wrappers = model, next(module for module in model.modules() if getattr(module, "module", None) is block)
    seen: dict[str, list[str]] = {}

    def note(moment: str) -> None:
        seen.setdefault(moment, [wrapper.training_state.name for wrapper in wrappers])

    def note_in_backward(_: nn.Module, __: Any, output: Tensor) -> None:
        note("forward of a block")
        output.register_hook(lambda _: note("backward of a block"))

    handles = [block.register_forward_hook(note_in_backward)]
    handles += [model.module.register_forward_hook(lambda *_: note("forward of the root"))]
    output = model(batch())
    note("between")
    output.sum().backward()
    for handle in handles:
        handle.remove()
    note("after")
    with type(model).summon_full_params(model):
        note("summoned")
    model.apply(lambda module: note("applied") if module is block else None)
    return seen


@pytest.mark.spec("NAMES-12")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("root", ["with parameters", "without parameters"])
@flat_or_original
@pytest.mark.cpu
@ranks(2)
def test_training_state_is_that_of_torch_at_each_moment(strategy: str, root: str, keep: bool) -> None:
    seen = []
    for shard, strategies in ((wrapped, ShardingStrategy), (as_torch, torch_fsdp.ShardingStrategy)):
        plain = seeded()
        block = plain.blocks[1]
        model = plain if root == "with parameters" else nn.Sequential(*plain.blocks)
        seen.append(states_seen(shard(model, sharding_strategy=strategies[strategy], use_orig_params=keep), block))
    ours, theirs = seen
    assert ours == theirs
    assert len(ours) == 7, "moments"


@pytest.mark.spec("NAMES-12")
@ranks(2)
def test_training_state_is_idle_after_an_error_in_forward() -> None:
    model = wrapped()

    def fail(*_: Any) -> None:
        raise ArithmeticError(model.training_state.name)

    handle = model.blocks[1].module.register_forward_hook(fail)
    with pytest.raises(ArithmeticError, match="FORWARD_BACKWARD"):
        model(batch())
    handle.remove()
    assert {wrapper.training_state.name for wrapper in FSDP.fsdp_modules(model)} == {"IDLE"}


@pytest.mark.spec("NAMES-12")
@pytest.mark.cpu
@ranks(2)
def test_hook_and_ignored_parameters_of_a_wrapper_are_those_of_torch() -> None:
    def attributes(wrapper: Any) -> list[Any]:
        plain = seeded()
        model = wrapper(plain, ignored_states=[plain.enter.weight], device_id=torch.device("cpu"))
        before = model._comm_hook, model._comm_hook_state
        hook = partial(print, end="")
        model.register_comm_hook("state", hook)
        ignored = [parameter is plain.enter.weight for parameter in model._ignored_params]
        return [before, model._comm_hook is hook, model._comm_hook_state, ignored]

    assert attributes(FSDP) == attributes(torch_fsdp.FullyShardedDataParallel) == [(None, None), True, "state", [True]]
