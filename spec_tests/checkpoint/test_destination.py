"""``state_dict(destination=..., prefix=...)``: entries of other models, versions of modules, and parts of units."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.checkpoint import checkpoints
from spec_tests.checkpoint.checkpoints import flat_or_original, make, set_form
from spec_tests.harness import device, ranks
from spec_tests.models.running import batch
from spec_tests.models.sharding import FLAT_STRATEGIES, NO_SHARD
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP


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
