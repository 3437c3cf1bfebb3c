"""Records the events of torch's FSDPs with minifsdp's recorder, so that tests of event orders also run on torch.

The functions here replace private functions of torch for the rest of the process. Without a recorder they only call the
original. An event has the meaning of the table in ``minifsdp/debugging/trace.py``: an all-gather is recorded when torch
issues it, a forward when the module is about to run, a FREE when the memory of the unsharded parameters is released.
Spans end where they begin, and a recorded all-reduce of the wrapper has no stream.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as group_module
import torch.distributed.fsdp._runtime_utils as runtime
import torch.distributed.fsdp.fully_sharded_data_parallel as wrapper_module
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from minifsdp.engine.events import events
from spec_tests.models.torch_names import param_groups

Group = group_module.FSDPParamGroup


def install() -> None:
    """Replaces the functions of both APIs."""
    record_fully_shard()
    record_wrapper()


def around(
    owner: Any,
    name: str,
    before: Callable[..., Any] = lambda *arguments: None,
    after: Callable[..., None] = lambda seen, *arguments: None,
) -> None:
    """Calls ``before(*arguments)`` before a function of torch, and ``after(its result, *arguments)`` after it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def recorded(*arguments: Any, **named: Any) -> Any:
        if events.recorder is None:
            return original(*arguments, **named)
        seen = before(*arguments)
        result = original(*arguments, **named)
        after(seen, *arguments)
        return result

    setattr(owner, name, recorded)


def write(kind: str, unit: str, members: dist.ProcessGroup | None = None, **facts: Any) -> None:
    if events.recorder is not None:
        ranks = tuple(dist.get_process_group_ranks(members)) if members is not None else ()
        events.recorder.begin(kind, unit, ranks=ranks, **facts)


# ---- fully_shard ----


def record_fully_shard() -> None:
    around(Group, "unshard", lambda group, *rest: group._all_gather_result, all_gathered)
    for name in ("_to_sharded", "_to_sharded_post_forward"):
        around(Group, name, lambda group, *rest: group.is_unsharded, freed)
    around(FSDPState, "_pre_forward", lambda state, *rest: state._training_state.name, entered)
    around(Group, "pre_backward", gradient_arrived)
    reducing: list[Group] = []
    around(
        Group,
        "post_backward",
        lambda group, *rest: reducing.append(group),
        lambda _, group, *rest: reducing.remove(group),
    )
    reduce = group_module.foreach_reduce

    @functools.wraps(reduce)
    def recorded_reduce(params: Any, *arguments: Any, **named: Any) -> Any:
        group = next((group for group in reducing if params[0] in group.fsdp_params), None)
        if group is not None:
            dtype = group._reduce_dtype or params[0].sharded_param.dtype
            # A group of one rank copies its gradient and sends nothing.
            if group._reduce_scatter_process_group.size() > 1:
                write("RS", group._module_fqn or "", group._reduce_scatter_process_group, dtype=dtype)
            if arguments[8] is not None and arguments[10]:
                write("AR", group._module_fqn or "", group._all_reduce_process_group, dtype=dtype)
        return reduce(params, *arguments, **named)

    group_module.foreach_reduce = recorded_reduce


def all_gathered(result_before: Any, group: Group, *rest: Any) -> None:
    result = group._all_gather_result
    if result_before is None and result is not None:
        output = result.all_gather_output
        facts = {"num_bytes": output.numel() * output.element_size(), "dtype": output.dtype}
        write("AG", group._module_fqn or "", group._all_gather_process_group, **facts)


def freed(was_unsharded: bool, group: Group, *rest: Any) -> None:
    if was_unsharded:
        write("FREE", group._module_fqn or "")


def entered(phase_before: str, state: FSDPState, *rest: Any) -> None:
    if phase_before == "IDLE":
        for group in param_groups(state):
            write("F", group._module_fqn or "")


def gradient_arrived(group: Group, *rest: Any) -> None:
    if group._training_state.name != "PRE_BACKWARD":
        write("B", group._module_fqn or "")


# ---- the wrapper ----

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# The names of the units, which torch's handles do not store.
named_roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
names: weakref.WeakKeyDictionary[FlatParamHandle, str] = weakref.WeakKeyDictionary()


def record_wrapper() -> None:
    root_pre_forward = wrapper_module._root_pre_forward

    @functools.wraps(root_pre_forward)
    def named_pre_forward(state: Any, module: nn.Module, *arguments: Any) -> Any:
        result = root_pre_forward(state, module, *arguments)
        name_units(state, module)
        return result

    wrapper_module._root_pre_forward = named_pre_forward
    around(wrapper_module, "_pre_forward", after=forward_entered)
    around(runtime, "_pre_backward_hook", backward_entered)
    around(FlatParamHandle, "_all_gather_flat_param", flat_all_gathered)
    around(FlatParamHandle, "_free_unsharded_flat_param", flat_freed)
    around(runtime, "_reduce_grad", flat_reduced)
    around(runtime, "_reduce_grad_no_shard", flat_all_reduced)


def name_units(state: Any, module: nn.Module) -> None:
    """Stores the names of all units below a root."""
    if state._is_root and module not in named_roots:
        named_roots.add(module)
        for name, child in module.named_modules():
            handle = getattr(child, "_handle", None)
            if handle is not None:
                parts = [part for part in name.split(".") if part not in WRAPPERS]
                names.setdefault(handle, ".".join(parts))


def unit_of(handle: FlatParamHandle) -> str:
    return names.get(handle, "")


def forward_entered(_: Any, state: Any, handle: FlatParamHandle | None, *rest: Any) -> None:
    if handle is not None:
        write("F", unit_of(handle))


def backward_entered(state: Any, module: nn.Module, handle: FlatParamHandle | None, *rest: Any) -> None:
    if handle is not None and not handle._ran_pre_backward_hook:
        write("B", unit_of(handle))


def flat_all_gathered(handle: FlatParamHandle, padded: Any) -> None:
    facts = {"num_bytes": padded.numel() * padded.element_size(), "dtype": padded.dtype}
    write("AG", unit_of(handle), handle.process_group, **facts)


def flat_freed(handle: FlatParamHandle) -> None:
    padded = handle._get_padded_unsharded_flat_param()
    size = padded.untyped_storage().nbytes()
    if size:
        write("FREE", unit_of(handle), num_bytes=size)


def flat_reduced(state: Any, handle: FlatParamHandle) -> None:
    grad = handle.flat_param.grad
    facts = {"num_bytes": grad.numel() * grad.element_size(), "dtype": grad.dtype}
    write("RS", unit_of(handle), state.process_group, **facts)
    if hasattr(state, "_inter_node_pg") and "HYBRID" in handle._sharding_strategy.name:
        write("AR", unit_of(handle), state._inter_node_pg, dtype=grad.dtype)


def flat_all_reduced(state: Any, handle: FlatParamHandle) -> None:
    grad = handle.flat_param.grad
    write("AR", unit_of(handle), state.process_group, num_bytes=grad.numel() * grad.element_size(), dtype=grad.dtype)
