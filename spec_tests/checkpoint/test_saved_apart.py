"""A saved state is a snapshot: it shares no memory with the model and optimizer that continue training.

Each test saves, trains until everything has changed, and checks that the saved values are unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minifsdp.checkpoint.tensors import memory_of
from spec_tests import subject
from spec_tests.checkpoint.checkpoints import local_part, set_form
from spec_tests.harness import device, ranks

FSDP = subject.FullyShardedDataParallel
each_setting = pytest.mark.parametrize(
    ("keep", "strategy"), [*itertools.product([False, True], [*subject.ShardingStrategy][:3])]
)
each_form = pytest.mark.parametrize("form", ["full", "sharded", "dtensor", "local"])


class Net(nn.Module):
    """A unit inside the root, buffers in both, a row of a larger table as a buffer, and a layer that is ignored."""

    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear(3, 5), nn.BatchNorm1d(5))
        self.outer = linear(5, 5)
        self.plain = nn.Linear(5, 5)
        self.register_buffer("steps", torch.zeros(2))
        self.table = torch.ones(100, 4, device=device())
        self.register_buffer("row", self.table[2])

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.row += 1
        return self.plain(self.outer(self.inner(x)).tanh())


def made(linear: type[nn.Linear] = nn.Linear) -> Net:
    torch.manual_seed(0)
    return Net(linear).to(device())


def wrapped(plain: Net, strategy: Any = None, keep: bool = False) -> tuple[FSDP, torch.optim.Optimizer]:
    model = FSDP(
        plain,
        auto_wrap_policy=subject.ModuleWrapPolicy({nn.Sequential}),
        sharding_strategy=strategy or subject.ShardingStrategy.FULL_SHARD,
        use_orig_params=keep,
        ignored_states=[plain.plain],
    )
    return model, torch.optim.Adam([{"params": list(model.parameters()), "betas": [0.9, 0.99]}], lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    dice = torch.Generator().manual_seed(1)
    model(torch.randn(4, 3, generator=dice).to(device())).square().sum().backward()
    optimizer.step()


def tensors(saved: Any) -> list[Tensor]:
    """All tensors in a saved state; for sharded ones, this rank's shard."""
    return [local_part(leaf) for leaf in tree_leaves(saved) if isinstance(leaf, Tensor)]


def picture(saved: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors(saved)]


def assert_unchanged(saved: Any, before: list[Tensor]) -> None:
    assert all(torch.equal(now, then) for now, then in zip(tensors(saved), before, strict=True))


def shared_names(saved: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Names of the buffers and parameters outside of all units whose memory ``saved`` uses."""
    own = {"plain.weight": model.module.plain.weight, "steps": model.module.steps}
    own["inner.1.running_mean"] = model.module.inner[1].running_mean
    return [name for name, tensor in own.items() if memory_of(saved[name]) == memory_of(tensor)]


@pytest.mark.spec("SD-FULL-07", "SD-SHARD-02", "SD-SHARD-05", "SD-LOCAL-03", "SAVE-01")
@pytest.mark.parametrize("offload", [False, True])
@each_form
@each_setting
@ranks(2)
def test_state_dict_is_a_copy_of_an_unchanged_model(keep: bool, strategy: Any, form: str, offload: bool) -> None:
    model, optimizer = wrapped(made(), strategy, keep)
    place = memory_of(model.module.steps)
    set_form(model, form, offload_to_cpu=offload)
    step(model, optimizer)
    saved = model.state_dict()
    before = picture(saved)
    # A view of one row would keep the storage of a whole unit alive.
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors(saved))
    step(model, optimizer)
    assert_unchanged(saved, before)
    assert shared_names(saved, model) == []
    # The save has neither moved the model's tensors nor added hooks.
    assert memory_of(model.module.steps) == place
    assert {len(wrapper._forward_pre_hooks) for wrapper in FSDP.fsdp_modules(model)} == {0}
    for key, value in model.state_dict().items():
        (now,), (then,) = tensors(value), tensors(saved[key])
        assert not now.numel() or not torch.equal(now, then), f"{key} has changed in the model"


@pytest.mark.spec("SD-FULL-07", "OSD-03", "OSD-04", "OSD-06", "OSD-LOAD-01")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("form", ["full", "sharded"])
@each_setting
@ranks(2)
def test_optimizer_states_and_the_dict_to_load_are_copies(keep: bool, strategy: Any, form: str, offload: bool) -> None:
    model, optimizer = wrapped(made(), strategy, keep)
    set_form(model, form, offload_to_cpu=offload)
    step(model, optimizer)
    for entries in optimizer.state.values():
        entries["history"] = deque([torch.zeros(2, device=device()), {"seen": torch.zeros(1)}], maxlen=3)
    optimizer.state["schedule"] = {"done": torch.zeros(3)}
    with pytest.warns(UserWarning, match="schedule"):
        saved = FSDP.optim_state_dict(model, optimizer)
    loadable = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    both = [saved, loadable]
    before = picture(both)
    settings = copy.deepcopy([saved["param_groups"], loadable["param_groups"]])

    def train_with_new_settings() -> None:
        step(model, optimizer)
        for tensor in tensors(list(optimizer.state.values())):
            tensor.add_(1)
        optimizer.param_groups[0]["betas"][0] += 0.01
        optimizer.param_groups[0]["lr"] *= 2

    train_with_new_settings()
    assert_unchanged(both, before)
    assert [saved["param_groups"], loadable["param_groups"]] == settings
    # A program can load one dict twice, with training in between. This and changes to `loadable` do not affect `saved`.
    before = picture(saved)
    optimizer.load_state_dict(loadable)
    train_with_new_settings()
    for tensor in tensors(loadable):
        tensor.add_(1)
    loadable["param_groups"][0]["betas"][0] = 0.0
    assert_unchanged(saved, before)
    assert saved["param_groups"] == settings[0]


class Outspoken(nn.Linear):
    """Adds views of its weight to the dict under other names, and to its extra state."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "first_row"] = self.weight[0].detach()

    def get_extra_state(self) -> Any:
        return {"rows": [self.weight.detach()[1:]], "name": "a name"}


@pytest.mark.spec("SD-FULL-07", "SD-FULL-01")
@each_setting
@ranks(2)
def test_values_written_by_custom_state_code_stay_unchanged(keep: bool, strategy: Any) -> None:
    plain = made(Outspoken)
    wanted = copy.deepcopy(plain.state_dict())
    model, optimizer = wrapped(plain, strategy, keep)

    def add_column(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "hooked"] = module.weight.detach()[:, 0]

    def add_buffers(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "all"] = [*plain.buffers()]

    model.module.outer.register_state_dict_post_hook(add_column)
    model.register_state_dict_post_hook(add_buffers)
    saved = model.state_dict()
    before = picture(saved)
    assert torch.equal(saved["outer.hooked"], wanted["outer.weight"][:, 0])
    assert torch.equal(saved["inner.0.first_row"], wanted["inner.0.weight"][0])
    assert saved["outer._extra_state"]["name"] == "a name"
    assert torch.equal(saved["outer._extra_state"]["rows"][0], wanted["outer.weight"][1:])
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors(saved))
    step(model, optimizer)
    assert_unchanged(saved, before)


@pytest.mark.spec("SD-FULL-01", "SD-FULL-07", "SUMMON-02")
@each_setting
@ranks(2)
def test_state_dict_of_summoned_model_is_a_copy_of_its_current_values(keep: bool, strategy: Any) -> None:
    model, optimizer = wrapped(made(Outspoken), strategy, keep)
    with FSDP.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
        saved = model.state_dict()
        assert list(saved) == list(model.module.state_dict())
        before = picture(saved)
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(1)
    assert saved["inner.0.weight"].tolist() == [[2.0] * 3] * 5
    step(model, optimizer)
    assert_unchanged(saved, before)


@pytest.mark.spec("SAVE-01")
@pytest.mark.parametrize("change", ["forward", "forward of an inner unit", "load"])
@ranks(2)
def test_saved_values_share_the_memory_of_an_idle_model_until_it_changes(change: str) -> None:
    model, _ = wrapped(made())
    saved, inner = model.state_dict(), model.module.inner.state_dict()
    before = picture([saved, inner])
    if device().type == "cpu":
        assert len(shared_names(saved, model)) == 3
    if change == "load":
        model.load_state_dict({name: value + 1 for name, value in saved.items()})
    else:
        changed = model if change == "forward" else model.module.inner
        changed(torch.ones(4, 3, device=device()))
    assert shared_names(saved, model) == []
    assert_unchanged([saved, inner], before)


@pytest.mark.spec("SAVE-01")
@pytest.mark.parametrize("moment", ["before backward", "before step", "summoned"])
@ranks(2)
def test_saved_values_are_copied_at_once_if_a_change_can_come_before_the_next_forward(moment: str) -> None:
    model, optimizer = wrapped(made())
    loss = model(torch.ones(4, 3, device=device())).sum()
    if moment != "before backward":
        loss.backward()
    with FSDP.summon_full_params(model) if moment == "summoned" else contextlib.nullcontext():
        saved = model.state_dict()
    if moment == "before backward":
        loss.backward()
    assert "plain.weight" not in shared_names(saved, model)
    before = picture(saved)
    optimizer.step()
    assert_unchanged(saved, before)


class Views(nn.Module):
    """Buffers that are views of one tensor, an expanded buffer, a tied buffer and a table in shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("stats", torch.zeros(4))
        self.register_buffer("first", self.stats[:2])
        self.register_buffer("again", self.stats)
        self.register_buffer("wide", torch.ones(2, 1).expand(2, 1000))
        self.register_buffer("temporary", torch.zeros(2), persistent=False)
        self.register_buffer("wave", torch.tensor([1j]))
        self.register_buffer("mirrored", self.wave.conj())
        self.rest = self.stats[2:]
        self.table = nn.Parameter(torch.zeros(3).share_memory_(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.first += 1
        self.rest += 2
        self.temporary += 1
        return (self.weight * x).sum() + self.stats.sum()


@pytest.mark.spec("SAVE-01")
@each_form
@pytest.mark.cpu  # shared memory
@ranks(2)
def test_views_and_shared_tensors_share_memory_after_a_save(form: str) -> None:
    plain = Views()
    model = FSDP(plain, ignored_states=[plain.table], device_id=torch.device("cpu"))
    set_form(model, form, offload_to_cpu=False)
    saved = model.state_dict()
    before = picture(saved)
    assert "temporary" not in saved
    assert (saved["wave"].item(), saved["mirrored"].item()) == (1j, -1j)
    assert memory_of(saved["table"]) != memory_of(plain.table), "another process can write to the table at any time"
    # One copy for both names, and only the elements that an expanded buffer or a view has.
    assert saved["wide"].untyped_storage().nbytes() == saved["first"].untyped_storage().nbytes() == 2 * 4
    for _ in range(2):
        model(torch.ones(4)).backward()
    assert plain.stats.tolist() == [2, 2, 4, 4]
    assert plain.first.data_ptr() == plain.stats.data_ptr() == plain.again.data_ptr()
    assert plain.table.is_shared()
    assert saved["stats"].data_ptr() == saved["again"].data_ptr(), "the forward has not made a second copy"
    assert_unchanged(saved, before)
    # torch cannot copy into an expanded buffer.
    model.load_state_dict({key: value for key, value in saved.items() if key != "wide"}, strict=False)
    assert plain.rest.tolist() == [0, 0]


@pytest.mark.spec("SD-FULL-07", "SAVE-01")
@ranks(2)
def test_sparse_buffers_and_buffers_computed_by_autograd_are_copied_without_a_warning() -> None:
    plain = made()
    plain.register_buffer("sparse", torch.eye(2).to_sparse().to(device()))
    plain.register_buffer("computed", torch.ones(2, requires_grad=True, device=device()) * 3)
    model, _ = wrapped(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = model.state_dict()
    assert memory_of(saved["computed"]) != memory_of(plain.computed)
    plain.sparse.mul_(3)
    assert torch.equal(saved["sparse"].to_dense().cpu(), torch.eye(2))


@pytest.mark.spec("SD-FULL-07")
@each_form
@each_setting
@ranks(2)
def test_keep_vars_returns_own_tensors_only_outside_units(keep: bool, strategy: Any, form: str) -> None:
    model, optimizer = wrapped(made(), strategy, keep)
    set_form(model, form, offload_to_cpu=False)
    saved = model.state_dict(keep_vars=True)
    assert saved.pop("plain.weight") is model.module.plain.weight
    assert saved.pop("steps") is model.module.steps
    for name in ("plain.bias", "row", "inner.1.running_mean", "inner.1.running_var", "inner.1.num_batches_tracked"):
        del saved[name]
    before = picture(saved)
    step(model, optimizer)
    assert_unchanged(saved, before)
    assert saved, "the parameters of units"


@pytest.mark.spec("SD-FULL-07")
@ranks(2)
def test_plain_outer_module_shares_its_own_tensors_with_the_state_dict_like_in_torch() -> None:
    model, optimizer = wrapped(made())
    around = nn.Sequential(model, nn.BatchNorm1d(5).to(device()))
    saved = around.state_dict()
    step(around, optimizer)
    assert torch.equal(saved["1.running_mean"], around[1].running_mean)
    assert not torch.equal(saved["0.inner.1.running_mean"], model.module.inner[1].running_mean)
