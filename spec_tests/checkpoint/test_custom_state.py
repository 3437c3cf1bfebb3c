"""Custom code in a state dict: overridden methods, hooks, and dicts requested inside ``summon_full_params``.

Such code was written for a plain module, so each result is compared with that of a plain module.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from spec_tests.checkpoint import checkpoints
from spec_tests.checkpoint.checkpoints import flat_or_original, set_form
from spec_tests.harness import device, ranks
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, ShardingStrategy, trace

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = ShardingStrategy


class Upright(nn.Linear):
    """Saves its weight transposed, adds its norm, and fills in a missing bias when it loads."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].t()
        destination[prefix + "norm"] = self.weight.detach().norm()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t()
        state.pop(prefix + "norm", None)
        state.setdefault(prefix + "bias", torch.full((5,), 3.0, device=device()))
        super()._load_from_state_dict(state, prefix, *rest)


class Summed(nn.Linear):
    """Has an extra state computed from its weight."""

    found: Any = None

    def get_extra_state(self) -> torch.Tensor:
        return self.weight.detach().sum().clone()

    def set_extra_state(self, state: Any) -> None:
        self.found = state, self.weight.detach().sum().clone()


def plain_model(kind: type[nn.Linear] = nn.Linear, seed: int = 0) -> nn.Sequential:
    """Two nested units: the second layer forms the inner unit, and the other layers belong to the outer unit."""
    torch.manual_seed(seed)
    return nn.Sequential(kind(3, 5), nn.Sequential(kind(5, 5)), nn.BatchNorm1d(5)).to(device())


def sharded(plain: nn.Module, keep: bool, **options: Any) -> FSDP:
    return FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=keep, **options)


def assert_same_dicts(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(state) == list(expected)
    assert all(checkpoints.is_plain(value) and torch.equal(value, expected[key]) for key, value in state.items())


@pytest.mark.spec("SD-FULL-01", "SD-FULL-07", "SD-FULL-08", "SD-SHARD-01", "SD-SHARD-03")
@pytest.mark.parametrize(("form", "assign"), [("full", False), ("full", True), ("dtensor", False)])
@flat_or_original
@ranks(2)
def test_custom_state_code_of_a_module_uses_full_values(keep: bool, form: str, assign: bool) -> None:
    expected = plain_model(Upright).state_dict()
    model, other = sharded(plain_model(Upright), keep), sharded(plain_model(Upright, 1), keep)
    for each in (model, other):
        set_form(each, form)
    state = model.state_dict()
    if form == "full":
        assert_same_dicts(state, expected)
    else:
        assert torch.equal(state["0.weight"].full_tensor(), expected["0.weight"])
        assert state["0.weight"].to_local().shape == ((2, 5), (1, 5))[dist.get_rank()]
        assert torch.equal(state["0.norm"], expected["0.norm"])
    other.load_state_dict(state, assign=assign)
    set_form(other, "full")
    assert_same_dicts(other.state_dict(), expected)


@pytest.mark.spec("SD-FULL-13", "SD-FULL-09")
@flat_or_original
@ranks(2)
def test_a_key_that_the_module_fills_in_may_be_missing(keep: bool) -> None:
    model = sharded(plain_model(Upright), keep)
    state = model.state_dict()
    del state["0.bias"], state["1.0.bias"]
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert model.state_dict()["1.0.bias"].tolist() == [3.0] * 5
    del state["0.weight"]
    with pytest.raises(KeyError, match=r"0\.weight"):
        model.load_state_dict(state)
    # The full parameters have been removed again.
    model(torch.ones(2, 3, device=device())).sum().backward()


@pytest.mark.spec("SD-FULL-01", "SD-FULL-08")
@pytest.mark.parametrize("form", ["full", "sharded"])
@flat_or_original
@ranks(2)
def test_an_extra_state_may_be_made_of_parameters(keep: bool, form: str) -> None:
    model = sharded(plain_model(Summed), keep)
    set_form(model, form)
    state = model.state_dict()
    model.load_state_dict(state)
    expected = plain_model(Summed)[0].get_extra_state()
    assert torch.equal(state["0._extra_state"], expected)
    assert [value.item() for value in model.module[0].found] == [expected.item()] * 2


@pytest.mark.spec("SD-FULL-08", "SD-FULL-09", "SD-FULL-13")
@pytest.mark.parametrize("where", ["the unit", "a unit further out", "the wrapper"])
@flat_or_original
@ranks(2)
def test_a_hook_may_rename_keys_of_an_older_version(keep: bool, where: str) -> None:
    plain = plain_model(seed=1)
    model = sharded(plain, keep)

    def rename(state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if "old_" in key]:
            state[key.replace("old_", "")] = state.pop(key)

    places = {"the unit": plain[1][0], "a unit further out": plain, "the wrapper": model}
    places[where]._register_load_state_dict_pre_hook(rename)
    new = plain_model().state_dict()
    old = {key.replace("1.0.", "1.0.old_"): value for key, value in new.items()}
    assert model.load_state_dict(old) == ([], [])
    assert_same_dicts(model.state_dict(), new)
    # A value that gets its name from the hook is checked, too.
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**old, "1.0.old_weight": old["1.0.old_weight"][:, :2]})


@pytest.mark.spec("SD-FULL-01")
@flat_or_original
@ranks(2)
def test_state_dict_hooks_of_the_user_on_a_wrapper_get_the_finished_dict(keep: bool) -> None:
    model, expected, seen = sharded(plain_model(), keep), plain_model().state_dict(), []

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
        return {"new." + key: value for key, value in state.items()}

    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: seen.append((prefix, dict(state))))
    model._register_state_dict_hook(rename)
    assert_same_dicts(model.state_dict(), {"new." + key: value for key, value in expected.items()})
    ((prefix, state),) = seen
    assert prefix == ""
    assert_same_dicts(state, expected)


@pytest.mark.spec("SD-FULL-01", "SD-FULL-03")
@flat_or_original
@ranks(2)
def test_a_hook_on_one_rank_only_does_not_make_the_others_wait(keep: bool) -> None:
    plain, seen = plain_model(), []
    model = sharded(plain, keep)

    def note(state: dict[str, Any], prefix: str) -> None:
        seen.append(state[prefix + "0.weight"].shape)

    if dist.get_rank() == 1:
        plain.register_state_dict_post_hook(lambda _, state, prefix, __: note(state, prefix))
        plain._register_load_state_dict_pre_hook(lambda state, prefix, *_: note(state, prefix))
    state = model.state_dict()
    model.load_state_dict(state)
    assert seen == ([] if dist.get_rank() == 0 else [(5, 3)] * 2)
    assert_same_dicts(model.state_dict(), plain_model().state_dict())


# ---- inside summon_full_params, and through torch.distributed.checkpoint ---------------------------------------------


@pytest.mark.spec("SUMMON-02", "SUMMON-07", "SD-FULL-03", "SD-FULL-08")
@pytest.mark.parametrize("rank0_only", [False, True])
@flat_or_original
@ranks(2)
def test_a_summoned_model_is_saved_by_one_rank_alone_and_loaded(keep: bool, rank0_only: bool) -> None:
    model, new = sharded(plain_model(), keep), plain_model(seed=1).state_dict()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=rank0_only), trace.record() as recorder:
        if dist.get_rank() == 0:
            assert_same_dicts(model.state_dict(), plain_model().state_dict())
    assert recorder.count("AG") == 0
    with FSDP.summon_full_params(model):
        assert model.load_state_dict(new) == ([], [])
    assert_same_dicts(model.state_dict(), new)


@pytest.mark.spec("SD-FULL-08")
@flat_or_original
@ranks(2)
def test_set_model_state_dict_loads_buffers_extra_states_and_checkpointed_modules(keep: bool) -> None:
    expected = plain_model(Summed).state_dict()
    expected["2.running_mean"] += 1
    model = sharded(plain_model(Summed, 1), keep)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    options = StateDictOptions(full_state_dict=True)
    assert set_model_state_dict(model, dict(expected), options=options) == ([], [])
    assert_same_dicts(model.state_dict(), expected)


@pytest.mark.spec("SD-FULL-13")
@pytest.mark.parametrize("awaits_backward", [False, True])
@flat_or_original
@ranks(2)
def test_set_model_state_dict_accepts_a_dict_without_a_key(keep: bool, awaits_backward: bool) -> None:
    """Defect: between forward and backward, the unsharded views that torch adds are not recognized."""
    model = sharded(plain_model(seed=1), keep, sharding_strategy=SHARD_GRAD_OP)
    if awaits_backward:
        model(torch.ones(4, 3, device=device()))
    before, state = model.state_dict(), plain_model().state_dict()
    del state["0.weight"]
    options = StateDictOptions(full_state_dict=True, strict=False)
    assert set_model_state_dict(model, dict(state), options=options) == (["0.weight"], [])
    after = model.state_dict()
    assert torch.equal(after.pop("0.weight"), before["0.weight"])
    assert_same_dicts(after, state)


# --- entries of other models, versions of modules, and parts of units ---


def filled() -> Any:
    """A dict that already contains another model of the same checkpoint."""
    state: Any = OrderedDict()
    state._metadata = OrderedDict()
    return nn.BatchNorm1d(1).state_dict(destination=state, prefix="other.")


@pytest.mark.spec("SAVE-02")
@pytest.mark.parametrize("prefix", ["", "mine.", "other."])
@flat_or_original
@ranks(2)
def test_with_rank0_only_a_rank_drops_only_the_entries_of_its_model(keep: bool, prefix: str) -> None:
    options: Any = {"use_orig_params": keep, "device_id": device()}
    plain = nn.Linear(3, 4).to(device())
    unit = FSDP(nn.Linear(3, 4), **options)
    model = FSDP(nn.Sequential(unit, nn.BatchNorm1d(4), plain), ignored_modules=[plain], **options)
    set_form(model, "rank 0")
    # An inner unit of another form keeps its shards on every rank.
    set_form(unit, "sharded")
    state = filled()
    state["theirs"] = plain.weight
    before = dict(state)
    assert model.state_dict(destination=state, prefix=prefix) is state
    assert all(state[key] is value for key, value in before.items())
    rows = {prefix + "0.weight", prefix + "0.bias"}
    if dist.get_rank() == 0:
        rows |= {prefix + key for key in nn.Sequential(nn.Tanh(), nn.BatchNorm1d(4), plain).state_dict()}
    assert state.keys() - before.keys() == rows
    # The model does not keep the entries of another model.
    entry = weakref.ref(before.pop("other.running_mean"))
    del state, before
    gc.collect()
    assert entry() is None


@pytest.mark.spec("SAVE-01", "SAVE-02")
@pytest.mark.parametrize("part", ["wrapper", "plain module around it"])
@ranks(2)
def test_part_of_wrapped_model_saves_copies_under_prefix(part: str) -> None:
    unit = FSDP(nn.BatchNorm1d(4), device_id=device())
    around = nn.Sequential(unit)
    model = FSDP(nn.Sequential(around), device_id=device())
    model(torch.randn(4, 4, device=device()))
    set_form(model, "rank 0")
    module, prefix = (unit, "other.0.") if part == "wrapper" else (around, "other.")
    saved = module.state_dict(destination=filled(), prefix=prefix)
    mine = {"other.0." + key for key in nn.BatchNorm1d(4).state_dict()}
    assert saved.keys() - filled().keys() == (mine if dist.get_rank() == 0 else set())
    if dist.get_rank() == 0:
        assert saved["other.0.running_mean"].data_ptr() != unit.module.running_mean.data_ptr()


class Versioned(nn.Module):
    """Its second version stores the weight with the opposite sign."""

    _version = 2

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.inner = inner

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2 and prefix + "weight" in state:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.spec("SAVE-03")
@flat_or_original
@ranks(2)
def test_a_module_migrates_an_old_state_dict_once(keep: bool) -> None:
    """A dict of the current version stays as it is, from a plain or a wrapped model, and in each form."""
    options: Any = {"use_orig_params": keep, "device_id": device()}
    inner = Versioned(FSDP(Versioned(), **options))
    plain = nn.Sequential(Versioned(Versioned()), Versioned()).to(device())
    model = FSDP(nn.Sequential(FSDP(inner, **options), Versioned()), **options)
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    plain.load_state_dict(model.state_dict())
    assert_same_dicts(plain.state_dict(), values)
    state = plain.state_dict()
    model.load_state_dict(state)
    assert list(state._metadata) == list(plain.state_dict()._metadata), "the caller's dict is not changed"
    for each in (model, nn.Sequential(FSDP(Versioned(), **options))):
        for form in ("sharded", "local", "full"):
            set_form(each, form)
            each.load_state_dict(each.state_dict())
        assert all(value.tolist() == [0, 1, 2, 3] for value in each.state_dict().values())
    for version in state._metadata.values():
        version["version"] = 1
    model.load_state_dict(state)
    assert_same_dicts(model.state_dict(), {name: -value for name, value in values.items()})
    # The paths of the versions have the prefix.
    versions, expected = (each.state_dict(prefix="model.")._metadata for each in (model, plain))
    assert all(versions[path] == version for path, version in expected.items())


@pytest.mark.spec("PROG-68")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("evaluates", [False, True])
@flat_or_original
@ranks(2)
def test_a_part_of_a_unit_has_no_state_dict_of_its_own(keep: bool, evaluates: bool, strategy: Any) -> None:
    model = checkpoints.wrapped(checkpoints.make(), use_orig_params=keep, sharding_strategy=strategy)
    plain = checkpoints.make()
    inner: Any = model.module
    parts = [(inner.first.module[0], plain.first[0]), (inner.head, plain.head), (inner, plain)]
    refused = pytest.raises(RuntimeError, match=rf"rank {dist.get_rank()}: .*inside of unit.*summon_full_params")
    if evaluates:
        with torch.no_grad():
            model(torch.ones(2, 3, device=device()))
    for part, same in parts:
        if keep and strategy is NO_SHARD:
            assert_same_dicts(dict(part.state_dict()), same.state_dict())
            part.load_state_dict(same.state_dict())
            continue
        with refused:
            part.state_dict()
        with refused:
            part.load_state_dict(same.state_dict())
    with FSDP.summon_full_params(model):
        for part, same in parts[:-1]:
            changed = {name: value + 1 for name, value in same.state_dict().items()}
            part.load_state_dict(changed)
            same.load_state_dict(changed)
            assert_same_dicts(dict(part.state_dict()), changed)
    assert_same_dicts(model.state_dict(), plain.state_dict())
