"""Old spellings, each understood with one warning."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from minifsdp import CPUOffload
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.wrap import ModuleWrapPolicy
from spec_tests.fsdp1.refusals import refused
from spec_tests.harness import ranks

POLICY = ModuleWrapPolicy({nn.Linear})


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


@pytest.mark.spec("LEGACY-01")
@ranks(2)
def test_the_old_keyword_of_the_policy_means_the_new_one_and_warns_once() -> None:
    with pytest.warns(FutureWarning, match="fsdp_auto_wrap_policy=.*auto_wrap_policy=") as caught:
        model = FSDP(two_layers(), fsdp_auto_wrap_policy=POLICY)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning points to the line that is to be changed"
    assert len(FSDP.fsdp_modules(model)) == 3


@pytest.mark.spec("LEGACY-01")
@ranks(2)
def test_the_old_and_the_new_keyword_together_are_refused() -> None:
    with refused(TypeError, "fsdp_auto_wrap_policy", "auto_wrap_policy"):
        FSDP(two_layers(), fsdp_auto_wrap_policy=POLICY, auto_wrap_policy=POLICY)


@pytest.mark.spec("LEGACY-04")
@ranks(2)
def test_an_offload_in_third_place_is_refused_with_the_keyword_to_use() -> None:
    with refused(TypeError, "CPUOffload", "cpu_offload="):
        FSDP(two_layers(), None, CPUOffload(offload_params=True))  # type: ignore[arg-type]


@pytest.mark.spec("NAMES-09")
@ranks(2)
def test_params_with_grad_lists_what_has_a_gradient_and_warns() -> None:
    model = FSDP(two_layers(), auto_wrap_policy=POLICY)
    with pytest.warns(FutureWarning, match="params_with_grad"):
        assert model.params_with_grad == []
    model.module[0](torch.ones(2, 3)).sum().backward()
    with pytest.warns(FutureWarning, match="params_with_grad"):
        found = model.params_with_grad
    assert [id(p) for p in found] == [id(p) for p in model.module[0].parameters()]


@pytest.mark.spec("LEGACY-09", "LEGACY-10")
@ranks(2)
def test_calls_in_the_shorter_forms_of_1_13_need_no_new_argument() -> None:
    from minifsdp import FullStateDictConfig, StateDictType

    model = FSDP(two_layers())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with FSDP.summon_full_params(model, True, False):
            assert model.module[0].weight.shape == (3, 3)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            assert model.state_dict()["0.weight"].shape == (3, 3)
