"""Hundreds of random sequences of calls, each wrong call by itself, and tests of the errors that they have found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from spec_tests.harness import device, ranks
from spec_tests.models.modules import WIDTH, Block, seeded
from spec_tests.models.sharding import sharded, wrapped
from spec_tests.random_programs import description, draw, judge, wrong
from spec_tests.subject import FullStateDictConfig, ModuleWrapPolicy, StateDictType, fully_shard
from spec_tests.subject import FullyShardedDataParallel as FSDP

SEEDS = range(3)
NUM_PROGRAMS = 25  # of each seed; many more: ``python -m spec_tests.random_programs calls``
apis = pytest.mark.parametrize("api", ["wrapped", "fully_shard"])


@pytest.mark.ranks
@pytest.mark.cpu
@pytest.mark.spec("FUZZ-01", "FUZZ-12")
@pytest.mark.parametrize("seed", SEEDS)
@apis
def test_random_programs_equal_one_process_or_raise_an_error_of_minifsdp(api: str, seed: int) -> None:
    programs = draw.drawn("calls", NUM_PROGRAMS, seed, api)
    verdicts = list(judge.judged(programs))
    assert judge.failure_of([verdict.program for verdict in verdicts if verdict.found]) is None
    # A test in which most calls are refused would check little.
    said = Counter(entry.partition(": ")[2] for verdict in verdicts for entry in verdict.log)
    assert said["ok"] > 10 * len(programs)
    # Refused calls must be drawn as well. Hypothesis also draws constants of the modules that are imported, so their
    # number differs between a run of all tests and a run of this file.
    assert sum(said.values()) - said["ok"] > len(programs) // 2


@pytest.mark.ranks
@pytest.mark.cpu
@pytest.mark.spec("FUZZ-02")
@apis
def test_each_wrong_call_is_refused_and_training_continues(api: str) -> None:
    programs = [draw.of_blocks(api=api, calls=({"do": "wrong", "line": line},)) for line in wrong.WRONG[api]]
    assert judge.failure_of(programs) is None


@pytest.mark.ranks
@pytest.mark.cpu
@pytest.mark.spec("FUZZ-03")
@apis
def test_programs_with_different_calls_on_the_ranks_raise_on_each_rank_without_a_hang(api: str) -> None:
    programs = [program for program in draw.drawn("apart", 12, 8, api) if program.is_apart]
    assert len(programs) >= 3
    assert judge.failure_of(programs) is None


@pytest.mark.spec("FUZZ-12")
@apis
def test_drawn_programs_contain_every_ingredient(api: str) -> None:
    programs = [program for seed in SEEDS for program in draw.drawn("calls", 50, seed, api)]
    options = Counter(option for program in programs for option in options_of(program))
    wanted = ["steps_by=foreach", "steps_by=fused", "how=data", "how=foreach", "of_model=True"]
    wanted += ["do=new_optimizer", "do=evaluate", "do=zero_grad"]
    if api == "fully_shard":
        wanted += ["do=generate", "do=convert", "how=assign", "dtype=float"]
    else:
        wanted += ["full_in_eval=True", "hook=in_place", "inner=True"]
    assert [option for option in wanted if options[option] < 5] == []
    kinds = {node.kind for program in programs for node, _ in description.walk(program.model)}
    assert kinds & set(draw.KINDS) == set(draw.FLAT_KINDS if api == "wrapped" else draw.KINDS)
    # An evaluation between a backward and a step, before a forward, and between forward and backward.
    pairs = Counter(pair for program in programs for pair in pairwise(call["do"] for call in program.calls))
    for pair in (("backward", "evaluate"), ("evaluate", "step"), ("evaluate", "forward"), ("forward", "evaluate")):
        assert pairs[pair] >= 5, pair


def options_of(program: Any) -> set[str]:
    """The options of a program, and the arguments of its calls."""
    given = [vars(program), *program.calls]
    return {f"{name}={value}" for options in given for name, value in options.items()}


# --- the errors that were found ---


@pytest.mark.spec("FUZZ-04")
@ranks(2)
def test_module_zero_grad_drops_gradients_of_unsharded_params() -> None:
    model = sharded()
    owned = list(model.parameters())
    x = torch.ones(2, WIDTH)
    for to_none in (True, False):
        model(x).sum().backward()
        # The root stays unsharded after a forward that autograd records.
        model(x)
        assert not all(one is other for one, other in zip(owned, model.parameters(), strict=True))
        model.zero_grad(set_to_none=to_none)
        left = [parameter.grad for parameter in owned if parameter.grad is not None]
        assert bool(left) is not to_none
        assert all(float(gradient.to_local().abs().sum()) == 0 for gradient in left)


@pytest.mark.spec("FUZZ-05")
@ranks(2)
def test_rank_without_full_parameters_neither_saves_nor_loads() -> None:
    model = wrapped()
    state = model.state_dict()
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        if dist.get_rank() == 0:
            # Rank 0 can save alone.
            assert model.state_dict().keys() == state.keys()
        else:
            with pytest.raises(
                RuntimeError, match=r"rank 1: state_dict.. was called while .* only the first rank has them"
            ):
                model.state_dict()
        with pytest.raises(
            RuntimeError, match=r"rank 1: unit .* expected load_state_dict.. outside of summon_full_params"
        ):
            model.load_state_dict(state)
    model.load_state_dict(state)


@pytest.mark.spec("FUZZ-06")
@pytest.mark.parametrize("options", [{}, {"rank0_only": True, "writeback": False}])
@pytest.mark.parametrize("originals", [False, True])
@ranks(2)
def test_clipping_and_step_raise_inside_summon(originals: bool, options: dict[str, bool]) -> None:
    model = wrapped(use_orig_params=originals)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, WIDTH)).sum().backward()
    with FSDP.summon_full_params(model, **options):
        with pytest.raises(RuntimeError, match=r"rank .: clip_grad_norm_.. was called while full parameters are summ"):
            model.clip_grad_norm_(1.0)
        with pytest.raises(RuntimeError, match=r"rank .: SGD.step.. was called while full parameters are summoned"):
            optimizer.step()
        # The optimizer of another model can step.
        other = nn.Linear(2, 2)
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    model.clip_grad_norm_(1.0)
    optimizer.step()


@pytest.mark.spec("FUZZ-07")
@pytest.mark.parametrize("when", ["forward", "backward"])
@ranks(2)
def test_prefetch_list_skips_units_outside_tree(when: str) -> None:
    model, plain = sharded(), seeded()
    block = model.blocks[1]
    getattr(block, f"set_modules_to_{when}_prefetch")([model, model.blocks[2]])
    x = torch.ones(2, WIDTH)
    y = block(x)
    torch.testing.assert_close(y, plain.blocks[1](x))
    y.sum().backward()
    model.zero_grad()
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.spec("FUZZ-09")
@ranks(2)
def test_a_full_state_dict_that_only_some_ranks_have_is_refused() -> None:
    model = FSDP(seeded(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        state = {key: value + 1 for key, value in model.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"rank 1: .*expected a shard, as on other ranks, found none"):
            model.load_state_dict(state, strict=False)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.spec("FUZZ-10")
@ranks(2)
def test_ranks_all_gather_alike_after_one_rank_refused_dict() -> None:
    model, plain = sharded(), seeded()
    model.blocks[1].unshard(async_op=True)
    # Full tensors are refused at once. For an empty dict, only the end of the load raises the error that all keys are
    # missing.
    state = plain.state_dict() if dist.get_rank() == 0 else {}
    with pytest.raises(RuntimeError, match="got full tensors" if dist.get_rank() == 0 else "Missing key"):
        model.load_state_dict(state)
    x = torch.ones(2, WIDTH)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.spec("FUZZ-11")
@ranks(2)
def test_summoned_unit_stays_unsharded_during_other_calls() -> None:
    model, x = wrapped(), torch.ones(2, WIDTH)
    first, second, *_ = model.module.blocks
    with torch.no_grad():
        # `first` is the root of its own tree until the model is called.
        first(x)
    with FSDP.summon_full_params(first):
        for called, plain in ((model, seeded()), (first, seeded().blocks[0])):
            torch.testing.assert_close(called(x), plain(x))
        second(x).sum().backward()
        torch.testing.assert_close(first(x), seeded().blocks[0](x))
    model.zero_grad()
    torch.testing.assert_close(model(x), seeded()(x))


# By message: a call with an argument that has the wrong type.
WRONG_TYPES: dict[str, Callable[[Any, Any], object]] = {
    "optim_state_dict(): optim_state_dict should be a dict": lambda model, optimizer: FSDP.optim_state_dict(
        model, optimizer, optimizer
    ),
    "optim_state_dict_to_load(): optim should be an optimizer": lambda model, optimizer: FSDP.optim_state_dict_to_load(
        model, model, {}
    ),
    "scatter_full_optim_state_dict(): model should be a torch.nn.Mod": lambda model, optimizer: (
        FSDP.scatter_full_optim_state_dict(None, optimizer, optim=model)
    ),
    "fully_shard(): offload_policy should be an OffloadPolicy of minifsdp": lambda model, optimizer: fully_shard(
        nn.Linear(2, 2), offload_policy=torch_fsdp.CPUOffloadPolicy()
    ),
    # A check that reads the iterator leaves nothing to ignore.
    "fully_shard(): ignored_params should be a set of parameters": lambda model, optimizer: fully_shard(
        nn.Linear(2, 2), ignored_params=iter(model.parameters())
    ),
}


@pytest.mark.spec("FUZZ-02", "FS2-23")
@pytest.mark.parametrize("message", WRONG_TYPES)
@ranks(2)
def test_an_argument_of_the_wrong_type_is_refused_by_name(message: str) -> None:
    model = FSDP(nn.Linear(2, 2, device=device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=re.escape(f"rank {dist.get_rank()}: {message}")):
        WRONG_TYPES[message](model, optimizer)
