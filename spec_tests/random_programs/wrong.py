"""Calls that are wrong by themselves: wrong types, values, places. Each is a line of Python.

minifsdp must refuse each call with its own error, or ignore it. Training must still work after it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from spec_tests import subject

_OF_BOTH = """\
side.model.load_state_dict(3)
side.model.load_state_dict(None)
side.model.load_state_dict({})
side.model.load_state_dict({1: torch.zeros(1)})
side.model.load_state_dict(list(side.model.state_dict()))
side.model.load_state_dict({**side.model.state_dict(), 'no.such.parameter': torch.zeros(2)})
side.model.load_state_dict(dict(list(side.model.state_dict().items())[:-1]))
side.model.load_state_dict({key: torch.zeros(1, 2, 3) for key in side.model.state_dict()})
side.model.load_state_dict(dict.fromkeys(side.model.state_dict(), 3))
side.model.load_state_dict(dict.fromkeys(side.model.state_dict()))
"""
# A rank that has full parameters can also call a part that is not a unit.
_OF_WRAPPER = """\
FSDP(3, process_group=side.group)
FSDP(nn.ModuleList([small()]), process_group=side.group)
FSDP(nn.Linear, process_group=side.group)
FSDP(small(), flatten_parameters=True)
FSDP(small(), process_group=side.group, cpu_offload=CPUOffload('yes'))
FSDP(small(), process_group=side.group, mixed_precision=torch.bfloat16)
FSDP(small(), process_group=side.group, mixed_precision={'param_dtype': torch.bfloat16})
FSDP(small(), process_group=side.group, mixed_precision=MixedPrecision(param_dtype='bf16'))(torch.zeros(1, 2))
FSDP(small(), process_group=side.group, auto_wrap_policy={nn.Linear})
FSDP(small(), process_group=side.group, ignored_states=['weight'])
FSDP(small(), process_group=side.group, device_id=2.5)
fully_shard(side.model)
fully_shard(side.inner_unit)
enter(side.inner_unit.no_sync())
side.inner_unit.clip_grad_norm_(1.0)
side.model.clip_grad_norm_('much')
side.model.clip_grad_norm_(None)
side.model.clip_grad_norm_(1.0, 'two')
side.model.clip_grad_norm_(1.0, [2])
enter(FSDP.summon_full_params(side.model, rank0_only=True))
enter(FSDP.summon_full_params(side.model, writeback=False, rank0_only=True, with_grads=True, offload_to_cpu=True))
enter(FSDP.summon_full_params(3))
enter(FSDP.summon_full_params([side.model]))
enter(FSDP.state_dict_type(side.model, 'full'))
enter(FSDP.state_dict_type(side.model, None))
enter(FSDP.state_dict_type(side.model, []))
enter(FSDP.state_dict_type(3, StateDictType.FULL_STATE_DICT))
enter(FSDP.state_dict_type(side.model, StateDictType.LOCAL_STATE_DICT, FullStateDictConfig()))
enter(FSDP.state_dict_type(side.model, StateDictType.FULL_STATE_DICT, {'rank0_only': True}))
FSDP.optim_state_dict(3, side.optimizer)
FSDP.optim_state_dict(side.model, 3)
FSDP.optim_state_dict(side.model, None)
FSDP.optim_state_dict(side.model, side.optimizer, {'a': 1})
FSDP.optim_state_dict(side.model, side.optimizer, 'state')
FSDP.optim_state_dict_to_load(side.model, side.optimizer, 3)
FSDP.optim_state_dict_to_load(side.model, side.optimizer, {})
FSDP.optim_state_dict_to_load(side.model, side.optimizer, None)
FSDP.optim_state_dict_to_load(side.model, side.optimizer, {'state': {}})
FSDP.optim_state_dict_to_load(side.model, side.optimizer, {'state': {}, 'param_groups': 3})
FSDP.optim_state_dict_to_load(side.model, side.optimizer, {'state': 3, 'param_groups': []})
FSDP.full_optim_state_dict(3, side.optimizer)
FSDP.rekey_optim_state_dict({}, OptimStateKeyType.PARAM_NAME, 3)
FSDP.rekey_optim_state_dict({}, 'name', side.model, optim=side.optimizer)
side.model.register_comm_hook(None, 3)
side.inner_unit.register_comm_hook(None, print)
side.model.apply(3)
FSDP.fsdp_modules(3)
side.hides_from_some or side.part_without_unit(torch.zeros(1, 4, dtype=torch.float64), None)
"""
_OF_FUNCTION = """\
fully_shard(3)
fully_shard([3])
fully_shard([])
fully_shard(nn.Linear)
fully_shard(nn.ModuleList([small()]))
fully_shard(side.model)
fully_shard(side.inner_unit)
fully_shard(side.part_without_unit)
FSDP(side.model, process_group=side.group)
FSDP(side.inner_unit, process_group=side.group)
fully_shard(small(), reshard_after_forward=0)(torch.zeros(1, 2))
fully_shard(small(), reshard_after_forward=-1)(torch.zeros(1, 2))
fully_shard(small(), reshard_after_forward=1.5)(torch.zeros(1, 2))
fully_shard(small(), mp_policy=torch.bfloat16)(torch.zeros(1, 2))
fully_shard(small(), mp_policy=None)(torch.zeros(1, 2))
fully_shard(small(), offload_policy=True)(torch.zeros(1, 2))
fully_shard(small(), shard_placement_fn=lambda parameter: 3)
fully_shard(small(), ignored_params=['weight'])(torch.zeros(1, 2))
side.model.set_modules_to_forward_prefetch([3])
side.model.set_modules_to_backward_prefetch([small()])
side.model.set_modules_to_backward_prefetch(side.inner_unit)
side.model.set_reshard_after_forward(2)
side.model.set_gradient_divide_factor(0)
register_fsdp_forward_method(side.model, 'nothing')
register_fsdp_forward_method(side.model, 3)
register_fsdp_forward_method(3, 'forward')
share_comm_ctx([3])
share_comm_ctx(3)
side.inner_unit.reset_iter_state()
side.model.load_state_dict({key: torch.zeros(value.shape) for key, value in side.model.state_dict().items()})
side.part_without_unit(torch.zeros(1, 4, dtype=torch.float64), None)
"""
PUBLIC = {name: getattr(subject, name) for name in subject.NAMES}


def options_of(name: str) -> list[str]:
    """The names of the options of an API."""
    return list(inspect.signature(PUBLIC[name]).parameters)[1:]


WRONG = {"wrapped": (_OF_BOTH + _OF_WRAPPER).splitlines(), "fully_shard": (_OF_BOTH + _OF_FUNCTION).splitlines()}
for value in ("3", "[3]", "'no'"):
    for option in options_of("FullyShardedDataParallel"):
        group = "" if "group" in option or "mesh" in option else "process_group=side.group, "
        WRONG["wrapped"].append(f"FSDP(small(), {group}{option}={value})")
    for option in options_of("fully_shard"):
        WRONG["fully_shard"].append(f"fully_shard(small(), {option}={value})(torch.zeros(1, 2))")
for setter in (name for name in dir(PUBLIC["FSDPModule"]) if name.startswith("set_")):
    WRONG["fully_shard"] += [f"side.model.{setter}({value})" for value in ("None", "'no'")]


def small() -> nn.Module:
    return nn.Linear(2, 3)


def enter(context: Any) -> None:
    """Enters a context, and leaves it at once."""
    with context:
        pass


def make(line: str, side: Any) -> None:
    """Makes a wrong call on the sharded model `side.model`."""
    names = {"FSDP": PUBLIC["FullyShardedDataParallel"], "torch": torch, "nn": nn, "small": small, "enter": enter}
    eval(line, {**PUBLIC, **names, "side": side})
