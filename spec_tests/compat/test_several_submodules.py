"""Several elements in arguments that take sets or lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions

from spec_tests import subject
from spec_tests.checkpoint.checkpoints import flat_or_original, make, quiet, step, wrapped
from spec_tests.harness import ranks
from spec_tests.models.modules import WIDTH, seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.models.sharding import sharded
from spec_tests.models.values import assert_same, full_gradients, full_values, mean_gradients
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import fully_shard


@pytest.mark.spec("PROG-63")
@pytest.mark.parametrize("get", ["get_model_state_dict", "get_state_dict"])
@flat_or_original
@pytest.mark.filterwarnings("ignore::FutureWarning")
@ranks(2)
def test_the_state_of_several_submodules_has_all_of_them(keep: bool, get: str) -> None:
    model: Any = wrapped(make(), use_orig_params=keep)
    options = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=True)
    given = [model] if get == "get_model_state_dict" else [model, torch.optim.Adam(model.parameters())]
    parts = {model.module.first, model.module.second, model.module.head}
    with quiet():
        found = getattr(subject, get)(*given, submodules=parts, options=options)
    state = found if get == "get_model_state_dict" else found[0]
    assert_same(state, {name: v for name, v in make().state_dict().items() if name != "scale"}, bitwise=True)


@pytest.mark.spec("IGN-04")
@pytest.mark.parametrize("kind", ["modules", "parameters"])
@ranks(2)
def test_several_ignored_states_all_stay_unsharded(kind: str) -> None:
    plain: Any = seeded()
    modules = [plain.enter, plain.leave, plain.blocks[1]]
    ignored = modules if kind == "modules" else [p for module in modules for p in module.parameters()]
    model = FSDP(plain, ignored_states=ignored, use_orig_params=True)
    assert [tuple(p.shape) for module in modules for p in module.parameters()] == [
        (WIDTH, WIDTH), (WIDTH,), (2, WIDTH), (2,), (WIDTH, WIDTH), (WIDTH,),
    ]  # fmt: skip
    assert_same(full_values(model), dict(seeded().named_parameters()), bitwise=True)


@pytest.mark.spec("FS2-23")
@ranks(2)
def test_several_ignored_parameters_all_stay_unsharded() -> None:
    plain: Any = seeded()
    ignored = {plain.enter.weight, plain.leave.weight, plain.leave.bias}
    model = fully_shard(plain, ignored_params=ignored)
    plain_tensors = {name for name, p in model.named_parameters() if type(p) is torch.nn.Parameter}
    assert plain_tensors == {"enter.weight", "leave.weight", "leave.bias"}


@pytest.mark.spec("NEW-04")
@ranks(2)
def test_a_list_of_four_modules_is_one_unit() -> None:
    model: Any = seeded()
    fully_shard(list(model.blocks))
    fully_shard(model)
    assert len({id(fully_shard.state(block).unit) for block in model.blocks}) == 1
    loss_of(model(batch())).backward()
    assert_same(full_gradients(model), mean_gradients(seeded()), bitwise=True)


@pytest.mark.spec("FS2-PREF-03")
@ranks(2)
def test_all_modules_of_a_prefetch_list_are_prefetched() -> None:
    model = sharded()
    blocks = list(model.blocks)
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    seen: list[list[bool]] = []
    blocks[0].register_forward_hook(
        lambda *_: seen.append([fully_shard.state(block).unit.state.name != "SHARDED" for block in blocks[1:]])
    )
    model(batch())
    assert seen == [[True, True, True]]


@pytest.mark.spec("PROG-64")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@ranks(2)
def test_three_optimizers_are_saved_and_loaded_together() -> None:
    def three(model: Any) -> list[torch.optim.Optimizer]:
        parameters = list(model.parameters())
        return [torch.optim.Adam(parameters[i::3], lr=0.01) for i in range(3)]

    model, other = (wrapped(make(seed), use_orig_params=True) for seed in range(2))
    optimizers, fresh = three(model), three(other)
    for optimizer in optimizers:
        step(model, optimizer, 0)
    with quiet():
        weights, states = subject.get_state_dict(model, optimizers)
        subject.set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=states)
    for mine, theirs in zip(optimizers, fresh, strict=True):
        found, expected = theirs.state_dict()["state"], mine.state_dict()["state"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key]["exp_avg"], expected[key]["exp_avg"]) for key in expected)
    assert all(len(optimizer.state) > 0 for optimizer in fresh)
