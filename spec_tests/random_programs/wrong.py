"""Calls that are wrong by themselves, by name: wrong types, values, places.

minifsdp must refuse each call with its own error, or ignore it. Training must still work after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spec_tests import subject
from spec_tests.subject import CPUOffload, FullStateDictConfig, MixedPrecision, StateDictType, fully_shard
from spec_tests.subject import FullyShardedDataParallel as FSDP

Wrong = Callable[[Any], object]


def small() -> nn.Module:
    return nn.Linear(2, 3)


def _wrapping(name: str, value: Any) -> Wrong:
    def call(side: Any) -> object:
        options = {"process_group": side.group, name: value}
        if name == "device_mesh":
            del options["process_group"]
        return FSDP(small(), **options)

    return call


def _sharding(name: str, value: Any) -> Wrong:
    def call(side: Any) -> object:
        model = fully_shard(small(), **{name: value})
        return model(torch.zeros(1, 2))

    return call


def _entering(make: Callable[[Any], Any]) -> Wrong:
    """Enters a context and leaves it at once."""

    def call(side: Any) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(make(side))

    return call


_LOADS: dict[str, Wrong] = {
    "load a number": lambda side: side.model.load_state_dict(3),
    "load None": lambda side: side.model.load_state_dict(None),
    "load nothing": lambda side: side.model.load_state_dict({}),
    "load numbers as keys": lambda side: side.model.load_state_dict({1: torch.zeros(1)}),
}

WRONG_WRAPPED: dict[str, Wrong] = {
    "wrap a number": lambda side: FSDP(3, process_group=side.group),
    "wrap a list": lambda side: FSDP(nn.ModuleList([small()]), process_group=side.group),
    "wrap a class": lambda side: FSDP(nn.Linear, process_group=side.group),
    "wrap by a wrong name": lambda side: FSDP(small(), flatten_parameters=True),
    **{
        f"{name}={value!r}": _wrapping(name, value)
        for name, value in (
            ("process_group", "gloo"),
            ("process_group", 3),
            ("sharding_strategy", "FULL_SHARD"),
            ("sharding_strategy", 1),
            ("cpu_offload", True),
            ("backward_prefetch", "pre"),
            ("mixed_precision", torch.bfloat16),
            ("mixed_precision", {"param_dtype": torch.bfloat16}),
            ("auto_wrap_policy", 3),
            ("auto_wrap_policy", {nn.Linear}),
            ("ignored_modules", 3),
            ("ignored_modules", [3]),
            ("ignored_states", 3),
            ("ignored_states", ["weight"]),
            ("param_init_fn", 3),
            ("device_id", "nowhere"),
            ("device_id", 2.5),
            ("device_mesh", 3),
        )
    },
    "CPUOffload(3)": lambda side: FSDP(small(), process_group=side.group, cpu_offload=CPUOffload("yes")),  # type: ignore[arg-type]
    "MixedPrecision('bf16')": lambda side: FSDP(
        small(),
        process_group=side.group,
        mixed_precision=MixedPrecision(param_dtype="bf16"),  # type: ignore[arg-type]
    )(torch.zeros(1, 2)),
    "fully_shard a wrapper": lambda side: fully_shard(side.model),
    "fully_shard a part": lambda side: fully_shard(side.inner_unit),
    "no_sync of a part": _entering(lambda side: side.inner_unit.no_sync()),
    "clip a part": lambda side: side.inner_unit.clip_grad_norm_(1.0),
    "clip by a word": lambda side: side.model.clip_grad_norm_("much"),
    "clip by None": lambda side: side.model.clip_grad_norm_(None),
    "clip with a wrong norm": lambda side: side.model.clip_grad_norm_(1.0, "two"),
    "clip with a list": lambda side: side.model.clip_grad_norm_(1.0, [2]),
    "summon to write on rank 0": _entering(lambda side: FSDP.summon_full_params(side.model, rank0_only=True)),
    "summon gradients to the CPU": _entering(
        lambda side: FSDP.summon_full_params(
            side.model, rank0_only=True, writeback=False, with_grads=True, offload_to_cpu=True
        )
    ),
    "summon a number": _entering(lambda side: FSDP.summon_full_params(3)),
    "summon a list": _entering(lambda side: FSDP.summon_full_params([side.model])),
    "state_dict_type of a word": _entering(lambda side: FSDP.state_dict_type(side.model, "full")),
    "state_dict_type of None": _entering(lambda side: FSDP.state_dict_type(side.model, None)),
    "state_dict_type of a list": _entering(lambda side: FSDP.state_dict_type(side.model, [])),
    "state_dict_type of a number": _entering(lambda side: FSDP.state_dict_type(3, StateDictType.FULL_STATE_DICT)),
    "a config of another type": _entering(
        lambda side: FSDP.state_dict_type(side.model, StateDictType.LOCAL_STATE_DICT, FullStateDictConfig())
    ),
    "a config that is a dict": _entering(
        lambda side: FSDP.state_dict_type(side.model, StateDictType.FULL_STATE_DICT, {"rank0_only": True})
    ),
    **_LOADS,
    "optim_state_dict of a number": lambda side: FSDP.optim_state_dict(3, side.optimizer),
    "optim_state_dict without optimizer": lambda side: FSDP.optim_state_dict(side.model, 3),
    "optim_state_dict of None": lambda side: FSDP.optim_state_dict(side.model, None),
    "optim_state_dict of a wrong dict": lambda side: FSDP.optim_state_dict(side.model, side.optimizer, {"a": 1}),
    "optim_state_dict of a word": lambda side: FSDP.optim_state_dict(side.model, side.optimizer, "state"),
    "optim_state_dict_to_load of a number": lambda side: FSDP.optim_state_dict_to_load(side.model, side.optimizer, 3),
    "optim_state_dict_to_load of nothing": lambda side: FSDP.optim_state_dict_to_load(side.model, side.optimizer, {}),
    "optim_state_dict_to_load of None": lambda side: FSDP.optim_state_dict_to_load(side.model, side.optimizer, None),
    "optim_state_dict_to_load of half": lambda side: FSDP.optim_state_dict_to_load(
        side.model, side.optimizer, {"state": {}}
    ),
    "optim_state_dict_to_load of wrong groups": lambda side: FSDP.optim_state_dict_to_load(
        side.model, side.optimizer, {"state": {}, "param_groups": 3}
    ),
    "optim_state_dict_to_load of a wrong state": lambda side: FSDP.optim_state_dict_to_load(
        side.model, side.optimizer, {"state": 3, "param_groups": []}
    ),
    "full_optim_state_dict of a number": lambda side: FSDP.full_optim_state_dict(3, side.optimizer),
    "rekey without model": lambda side: FSDP.rekey_optim_state_dict({}, subject.OptimStateKeyType.PARAM_NAME, 3),
    "rekey to a word": lambda side: FSDP.rekey_optim_state_dict({}, "name", side.model, optim=side.optimizer),
    "a hook that is none": lambda side: side.model.register_comm_hook(None, 3),
    "a hook on a part": lambda side: side.inner_unit.register_comm_hook(None, print),
    "apply a number": lambda side: side.model.apply(3),
    "fsdp_modules of a number": lambda side: FSDP.fsdp_modules(3),
    # If only rank 0 has full parameters, it can compute with them.
    "call a part that is not a unit": lambda side: (
        side.hides_from_some or side.part_without_unit(torch.zeros(1, 4, dtype=torch.float64), None)
    ),
}

WRONG_COMPOSED: dict[str, Wrong] = {
    "shard a number": lambda side: fully_shard(3),  # type: ignore[type-var]
    "shard a list of numbers": lambda side: fully_shard([3]),  # type: ignore[type-var]
    "shard nothing": lambda side: fully_shard([]),  # type: ignore[type-var]
    "shard a class": lambda side: fully_shard(nn.Linear),  # type: ignore[type-var]
    "shard a ModuleList": lambda side: fully_shard(nn.ModuleList([small()])),
    "shard again": lambda side: fully_shard(side.model),
    "shard a part again": lambda side: fully_shard(side.inner_unit),
    "shard a part after the whole": lambda side: fully_shard(side.part_without_unit),
    "wrap it": lambda side: FSDP(side.model, process_group=side.group),
    "wrap a part": lambda side: FSDP(side.inner_unit, process_group=side.group),
    **{
        f"{name}={value!r}": _sharding(name, value)
        for name, value in (
            ("mesh", 3),
            ("mesh", "cpu"),
            ("reshard_after_forward", "yes"),
            ("reshard_after_forward", 3),
            ("reshard_after_forward", 0),
            ("reshard_after_forward", -1),
            ("reshard_after_forward", 1.5),
            ("mp_policy", 3),
            ("mp_policy", torch.bfloat16),
            ("mp_policy", None),
            ("offload_policy", 3),
            ("offload_policy", True),
            ("shard_placement_fn", 3),
            ("ignored_params", 3),
            ("ignored_params", [3]),
            ("ignored_params", ["weight"]),
        )
    },
    "shard_placement_fn that returns 3": lambda side: fully_shard(small(), shard_placement_fn=lambda parameter: 3),
    "prefetch a number": lambda side: side.model.set_modules_to_forward_prefetch(3),
    "prefetch a list of numbers": lambda side: side.model.set_modules_to_forward_prefetch([3]),
    "prefetch a plain module": lambda side: side.model.set_modules_to_backward_prefetch([small()]),
    "prefetch one module": lambda side: side.model.set_modules_to_backward_prefetch(side.inner_unit),
    "prefetch None": lambda side: side.model.set_modules_to_backward_prefetch(None),
    "set_reshard_after_forward('yes')": lambda side: side.model.set_reshard_after_forward("yes"),
    "set_reshard_after_forward(2)": lambda side: side.model.set_reshard_after_forward(2),
    "set_reshard_after_backward('no')": lambda side: side.model.set_reshard_after_backward("no"),
    "set_requires_gradient_sync(None)": lambda side: side.model.set_requires_gradient_sync(None),
    "set_requires_gradient_sync('no')": lambda side: side.model.set_requires_gradient_sync("no"),
    "set_requires_all_reduce(None)": lambda side: side.model.set_requires_all_reduce(None),
    "set_is_last_backward(None)": lambda side: side.model.set_is_last_backward(None),
    "set_unshard_in_backward('yes')": lambda side: side.model.set_unshard_in_backward("yes"),
    "set_gradient_divide_factor('two')": lambda side: side.model.set_gradient_divide_factor("two"),
    "set_gradient_divide_factor(None)": lambda side: side.model.set_gradient_divide_factor(None),
    "set_gradient_divide_factor(0)": lambda side: side.model.set_gradient_divide_factor(0),
    "set_all_reduce_hook(3)": lambda side: side.model.set_all_reduce_hook(3),
    "set_post_optim_event(3)": lambda side: side.model.set_post_optim_event(3),
    "register a method that is none": lambda side: subject.register_fsdp_forward_method(side.model, "nothing"),
    "register a number": lambda side: subject.register_fsdp_forward_method(side.model, 3),
    "register on a number": lambda side: subject.register_fsdp_forward_method(3, "forward"),
    "share of a number": lambda side: subject.share_comm_ctx([3]),
    "share a number": lambda side: subject.share_comm_ctx(3),
    "forget a part's iteration": lambda side: side.inner_unit.reset_iter_state(),
    "a custom gather": lambda side: side.model.set_custom_all_gather(None),
    **_LOADS,
    "load whole tensors": lambda side: side.model.load_state_dict(
        {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in side.model.state_dict().items()}
    ),
    "call a part that is not a unit": lambda side: side.part_without_unit(torch.zeros(1, 4, dtype=torch.float64), None),
}
