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
from spec_tests.checkpoint.checkpoints import flat_or_original, is_plain, local_part, make, set_form
from spec_tests.harness import device, ranks
from spec_tests.models.running import batch
from spec_tests.models.sharding import FLAT_STRATEGIES, NO_SHARD
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, ShardingStrategy, trace


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


def plain_model(kind: type[nn.Linear], seed: int = 0) -> nn.Sequential:
    """Two nested units: the second layer forms the inner unit, and the other layers belong to the outer unit."""
    torch.manual_seed(seed)
    return nn.Sequential(kind(3, 5), nn.Sequential(kind(5, 5)), nn.BatchNorm1d(5)).to(device())


def sharded(plain: nn.Module, keep: bool, **options: Any) -> FSDP:
    return FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=keep, **options)


def assert_same_dicts(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(state) == list(expected)
    assert all(is_plain(value) and torch.equal(value, expected[key]) for key, value in state.items())


@pytest.mark.spec("SD-FULL-01", "SD-FULL-07", "SD-FULL-08", "SD-SHARD-01", "SD-SHARD-03")
@pytest.mark.parametrize("form", ["full", "dtensor"])
@pytest.mark.parametrize("assign", [False, True])
@flat_or_original
@ranks(2)
def test_custom_state_code_of_a_module_uses_full_values(keep: bool, assign: bool, form: str) -> None:
    expected = plain_model(Upright).state_dict()
    model, other = sharded(plain_model(Upright), keep), sharded(plain_model(Upright, 1), keep)
    for each in (model, other):
        set_form(each, form)
    state = model.state_dict()
    if form == "full":
        assert_same_dicts(state, expected)
    else:
        assert torch.equal(state["0.weight"].full_tensor(), expected["0.weight"])
        assert local_part(state["0.weight"]).shape == ((2, 5), (1, 5))[dist.get_rank()]
        assert torch.equal(state["0.norm"], expected["0.norm"])
    other.load_state_dict(state, assign=assign and form == "full")
    set_form(other, "full")
    assert_same_dicts(other.state_dict(), expected)
    # The values in the dict do not share memory with the unit.
    for parameter in model.parameters():
        parameter.data.zero_()
    assert form != "full" or torch.equal(state["0.weight"], expected["0.weight"])


@pytest.mark.spec("SD-FULL-13", "SD-FULL-09")
@flat_or_original
@ranks(2)
def test_a_key_that_the_module_fills_in_may_be_missing(keep: bool) -> None:
    model = sharded(plain_model(Upright), keep)
    state, shapes = model.state_dict(), [parameter.shape for parameter in model.parameters()]
    del state["0.bias"], state["1.0.bias"]
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert model.state_dict()["1.0.bias"].tolist() == [3.0] * 5
    del state["0.weight"]
    with pytest.raises(KeyError):
        model.load_state_dict(state)
    # The full parameters have been removed again.
    assert [parameter.shape for parameter in model.parameters()] == shapes
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


@pytest.mark.spec("SD-FULL-08", "SD-FULL-13")
@pytest.mark.parametrize("where", ["the unit", "a unit further out", "the wrapper"])
@flat_or_original
@ranks(2)
def test_a_hook_may_rename_keys_of_an_older_version(keep: bool, where: str) -> None:
    plain = plain_model(nn.Linear, 1)
    model = sharded(plain, keep)

    def rename(state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if "old_" in key]:
            state[key.replace("old_", "")] = state.pop(key)

    places = {"the unit": plain[1][0], "a unit further out": plain, "the wrapper": model}
    places[where]._register_load_state_dict_pre_hook(rename)
    new = plain_model(nn.Linear).state_dict()
    old = {key.replace("1.0.", "1.0.old_"): value for key, value in new.items()}
    assert model.load_state_dict(old) == ([], [])
    assert_same_dicts(model.state_dict(), new)


@pytest.mark.spec("SD-FULL-09")
@ranks(2)
def test_value_that_an_outer_load_hook_resized_is_refused() -> None:
    plain = plain_model(nn.Linear)
    model = sharded(plain, keep=False)
    state = model.state_dict()

    def spoil(state: dict[str, Any], prefix: str, *_: Any) -> None:
        key = next(key for key in state if key.endswith("1.0.weight"))
        state[key] = state[key][:, :2]

    plain._register_load_state_dict_pre_hook(spoil)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state)


@pytest.mark.spec("SD-FULL-01")
@flat_or_original
@ranks(2)
def test_state_dict_hooks_of_the_user_on_a_wrapper_get_the_finished_dict(keep: bool) -> None:
    model = sharded(plain_model(nn.Linear), keep)
    expected, seen = plain_model(nn.Linear).state_dict(), []

    def note(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        seen.append((prefix, dict(state)))

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
        return {"new." + key: value for key, value in state.items()}

    model.register_state_dict_post_hook(note)
    model._register_state_dict_hook(rename)
    assert_same_dicts(model.state_dict(), {"new." + key: value for key, value in expected.items()})
    ((prefix, state),) = seen
    assert prefix == ""
    assert_same_dicts(state, expected)


@pytest.mark.spec("SD-FULL-01", "SD-FULL-03")
@flat_or_original
@ranks(2)
def test_a_hook_on_one_rank_only_does_not_make_the_others_wait(keep: bool) -> None:
    plain = plain_model(nn.Linear)
    model = sharded(plain, keep)
    seen: list[torch.Size] = []
    if dist.get_rank() == 1:
        note = lambda state, prefix, *_: seen.append(state[prefix + "0.weight"].shape)  # noqa: E731
        plain.register_state_dict_post_hook(lambda _, *arguments: note(*arguments))
        plain._register_load_state_dict_pre_hook(note)
    state = model.state_dict()
    model.load_state_dict(state)
    assert seen == ([] if dist.get_rank() == 0 else [(5, 3)] * 2)
    assert_same_dicts(model.state_dict(), plain_model(nn.Linear).state_dict())


# ---- inside summon_full_params, and through torch.distributed.checkpoint ---------------------------------------------


@pytest.mark.spec("SUMMON-02", "SD-FULL-03")
@pytest.mark.parametrize("rank0_only", [False, True])
@flat_or_original
@ranks(2)
def test_a_summoned_model_can_be_written_by_one_rank_alone(keep: bool, rank0_only: bool) -> None:
    model = sharded(plain_model(nn.Linear), keep)
    with FSDP.summon_full_params(model, writeback=False, rank0_only=rank0_only), trace.record() as r:
        if dist.get_rank() == 0:
            assert_same_dicts(model.state_dict(), plain_model(nn.Linear).state_dict())
    assert r.count("AG") == 0


@pytest.mark.spec("SUMMON-07", "SD-FULL-08")
@flat_or_original
@ranks(2)
def test_load_state_dict_inside_summon_persists(keep: bool) -> None:
    model = sharded(plain_model(nn.Linear, 1), keep)
    new = plain_model(nn.Linear).state_dict()
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
    model = sharded(plain_model(nn.Linear, 1), keep, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    if awaits_backward:
        model(torch.ones(4, 3, device=device()))
    before, state = model.state_dict(), plain_model(nn.Linear).state_dict()
    del state["0.weight"]
    options = StateDictOptions(full_state_dict=True, strict=False)
    result = set_model_state_dict(model, dict(state), options=options)
    assert result.missing_keys == ["0.weight"] and not result.unexpected_keys
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
    mine = {prefix + key for key in nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), plain).state_dict()}
    rows = {prefix + "0.weight", prefix + "0.bias"}
    assert set(state) - set(before) == (mine if dist.get_rank() == 0 else rows)
    # The model does not keep the entries of another model.
    entry = weakref.ref(before.pop("other.running_mean"))
    del state, before
    gc.collect()
    assert entry() is None


@pytest.mark.spec("SAVE-01", "SAVE-02")
@pytest.mark.parametrize("part", ["wrapper", "plain module around it"])
@ranks(2)
def test_part_of_wrapped_model_saves_copies_under_prefix(part: str) -> None:
    model = FSDP(nn.Sequential(nn.Sequential(FSDP(nn.BatchNorm1d(4), device_id=device()))), device_id=device())
    model(torch.randn(4, 4, device=device()))
    set_form(model, "rank 0")
    around = model.module[0]
    module, prefix = (around[0], "other.0.") if part == "wrapper" else (around, "other.")
    saved = module.state_dict(destination=filled(), prefix=prefix)
    assert "other.running_mean" in saved
    keys = {"other.0." + key for key in nn.BatchNorm1d(4).state_dict()}
    assert keys & set(saved) == (keys if dist.get_rank() == 0 else set())
    mean = around[0].module.running_mean
    assert dist.get_rank() or saved["other.0.running_mean"].data_ptr() != mean.data_ptr()


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


def plain() -> nn.Module:
    return nn.Sequential(Versioned(Versioned()), Versioned())


def wrapped(keep: bool) -> FSDP:
    options: Any = {"use_orig_params": keep, "device_id": device()}
    inner = Versioned(FSDP(Versioned(), **options))
    return FSDP(nn.Sequential(FSDP(inner, **options), Versioned()), **options)


def assert_weights(model: nn.Module, sign: int = 1) -> None:
    with FSDP.summon_full_params(model):
        for parameter in model.parameters():
            assert parameter.tolist() == [sign * value for value in range(4)]


@pytest.mark.spec("SAVE-03")
@flat_or_original
@ranks(2)
def test_versions_of_modules_are_kept_from_and_to_a_plain_model(keep: bool) -> None:
    model, target = wrapped(keep), plain()
    target.load_state_dict(model.state_dict())
    assert_weights(target)
    state = plain().state_dict()
    model.load_state_dict(state)
    assert list(state._metadata) == list(plain().state_dict()._metadata), "the caller's dict is not changed"
    assert_weights(model)
    for version in state._metadata.values():
        version["version"] = 1
    model.load_state_dict(state)
    assert_weights(model, sign=-1)
    # The paths of the versions have the prefix.
    versions, expected = (each.state_dict(prefix="model.")._metadata for each in (model, plain()))
    assert all(versions[path] == version for path, version in expected.items())


@pytest.mark.spec("SAVE-03")
@pytest.mark.parametrize("form", ["full", "sharded", "local"])
@flat_or_original
@ranks(2)
def test_versions_of_modules_are_kept_between_wrapped_models(keep: bool, form: str) -> None:
    around = nn.Sequential(FSDP(Versioned(), use_orig_params=keep, device_id=device()))
    for model in (wrapped(keep), around):
        set_form(model, form)
        model.load_state_dict(model.state_dict())
        assert_weights(model)


PARTS = ("first.0", "second.0", "head", "")


@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@pytest.mark.spec("PROG-68")
@ranks(2)
def test_a_part_of_a_unit_has_no_state_dict_of_its_own(keep: bool, strategy: Any) -> None:
    model, plain = checkpoints.wrapped(make(), use_orig_params=keep, sharding_strategy=strategy), make()
    paths = {path.replace("_fsdp_wrapped_module.", ""): module for path, module in model.named_modules()}
    parts = [(paths[name] if name else model.module, plain.get_submodule(name)) for name in PARTS]
    refused = rf"rank {dist.get_rank()}: .*inside of unit.*summon_full_params"
    for evaluates in (False, True):
        if evaluates:
            with torch.no_grad():
                model(batch(width=3))
        for part, same in parts:
            expected = same.state_dict()
            if keep and strategy is NO_SHARD:
                found = part.state_dict()
                assert all(torch.equal(found[name], value) for name, value in expected.items())
                part.load_state_dict(expected)
                continue
            with pytest.raises(RuntimeError, match=refused):
                part.state_dict()
            with pytest.raises(RuntimeError, match=refused):
                part.load_state_dict(expected)
    with FSDP.summon_full_params(model):
        for part, same in parts[:-1]:
            changed = {name: value + 1 for name, value in same.state_dict().items()}
            part.load_state_dict(changed)
            same.load_state_dict(changed)
            assert all(torch.equal(part.state_dict()[name], value) for name, value in changed.items())
    assert_same(full_values(model), dict(plain.named_parameters()), bitwise=True)
