"""Records torch's ``fully_shard`` with minifsdp's recorder, to check the golden event orders against it.

Only `subject.py` uses this, and only when torch is the subject. The events are those of minifsdp: an all-gather when it
is issued, a forward when the module is about to run, a FREE when the unsharded parameters are freed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as group_module
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from minifsdp import trace

Group = group_module.FSDPParamGroup
GROUPS = {
    "AG": lambda group: group._all_gather_process_group,
    "RS": lambda group: group._reduce_scatter_process_group,
    "AR": lambda group: group._all_reduce_process_group,
}


def install() -> None:
    """Replaces a few methods for the rest of the process."""
    around(Group, "unshard", before=lambda group: group._all_gather_result, after=gathered)
    for name in ("_to_sharded", "_to_sharded_post_forward"):
        around(Group, name, before=lambda group: group.is_unsharded, after=freed)
    around(FSDPState, "_pre_forward", before=lambda state: state._training_state.name, after=entered)
    around(Group, "pre_backward", before=arrived)
    reduce = group_module.foreach_reduce

    @functools.wraps(reduce)
    def recorded_reduce(params: Any, *args: Any) -> Any:
        group = next(g for g in groups_reducing if params[0] in g.fsdp_params)
        write("RS", group)
        if args[8] is not None and args[10]:
            write("AR", group)
        return reduce(params, *args)

    group_module.foreach_reduce = recorded_reduce
    around(Group, "post_backward", before=groups_reducing.append, after=lambda group, _: groups_reducing.remove(group))


groups_reducing: list[Group] = []


def around(
    owner: type, name: str, before: Callable[[Any], Any], after: Callable[[Any, Any], None] = lambda me, seen: None
) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = before(self)
        result = original(self, *args, **kwargs)
        after(self, seen)
        return result

    setattr(owner, name, recorded)


def write(kind: str, group: Group) -> None:
    if trace.recorder is not None:
        members = GROUPS[kind](group) if kind in GROUPS else None
        ranks = tuple(dist.get_process_group_ranks(members)) if members is not None else ()
        trace.recorder.begin(kind, group._module_fqn or "", ranks=ranks)


def gathered(group: Group, result_before: Any) -> None:
    if result_before is None and group._all_gather_result is not None:
        write("AG", group)


def freed(group: Group, was_unsharded: bool) -> None:
    if was_unsharded:
        write("FREE", group)


def entered(state: FSDPState, phase_before: str) -> None:
    if phase_before == "IDLE":
        for group in state._fsdp_param_groups:
            write("F", group)


def arrived(group: Group) -> None:
    if group._training_state.name != "PRE_BACKWARD":
        write("B", group)
