"""Checks between ranks before a state dict is saved or loaded: all ranks are present, agree, and accept the dict.

Checkpoints are rare, so saving and loading can afford small exchanges of Python objects, which a training step cannot.
They take place *before* the first tensor is sent. Each one replaces a hang with an error:

* `monitored_barrier` checks that all ranks are present. ``state_dict()`` issues all-gathers, so all ranks must call it;
  a common mistake is to call it under ``if rank == 0``. Every rank registers in the group's store and waits there.
* `exchange` of ``engine/exchange.py`` sends facts to all ranks. For example, an optimizer may have a state on one rank
  and none on another.
* `refuse_together` raises on all ranks if one rank found a problem. If only that rank raised, the others would continue
  into a collective and hang.

Worked example, two ranks, and a problem that only rank 1 finds::

    monitored_barrier    both ranks have called load_state_dict()
    refuse_together      rank 0 receives the problem of rank 1; both raise an error, and nothing was changed

The store is the one that the ranks used for rendezvous. It works for every backend, even if collectives no longer
work. It also counts the arrivals, so that ranks cannot disagree about the count. Cost of a barrier: six messages from
each rank to the store, 0.2 ms on one machine. A rank that has a rare fact to send sets a flag in the barrier, and the
ranks exchange facts only if a flag is set.

*In torch:* no such check. A ``state_dict()`` call on one rank ends in the backend's timeout, which names neither the
call nor the missing ranks, and a rank that rejects a dict leaves the others waiting.

Spec: SD-FULL-03, SD-FULL-05, SD-FULL-09, OSD-FULL-02.
"""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minifsdp.checks.details import some
from minifsdp.engine.events import events
from minifsdp.engine.exchange import exchange
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message

# A state dict of another model can have a problem in every key, on a thousand ranks.
MOST_LINES = 10


class StateDictMismatchError(RuntimeError, ValueError):
    """The state dict does not fit the model or the optimizer. In this case ``nn.Module`` raises `RuntimeError`, and an
    optimizer raises `ValueError`.
    """


def refuse_together(
    groups: Sequence[Group], problems: Sequence[str], opening: str = ""
) -> None:
    """Raises on every rank if any rank has a problem. All ranks of the groups must call it.

    Args:
        groups: the groups that must agree; if empty, only this rank is checked.
        problems: the problems on this rank; each names the key, the expected value and the value found.
        opening: a prefix of the message that programs may look for.

    Raises:
        StateDictMismatchError: some rank has a problem. The message lists the ranks of each problem.
    """
    ranks_with: dict[str, list[str]] = {}
    for rank, found in exchange(groups, list(problems)).items():
        for problem in found:
            ranks_with.setdefault(problem, []).append(f"rank {rank}")
    if not ranks_with:
        return
    lines = [f"{some(ranks)}: {problem}" for problem, ranks in ranks_with.items()]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more"]
    raise StateDictMismatchError(
        message(
            "state-dict-refused",
            opening=opening,
            where=" on every rank" if groups else "",
            lines="\n".join(lines),
        )
    )


def refuse_lacking(
    groups: Sequence[Group], mine: Iterable[str], opening: str = ""
) -> None:
    """Raises on every rank if any rank lacks something that others have. All ranks of the groups must call it.

    Args:
        groups: the groups that must agree.
        mine: for each thing that this rank has, the problem to report for a rank that does not have it.
        opening: see `refuse_together`.

    Raises:
        StateDictMismatchError: some rank lacks something.
    """
    here = set(mine)
    refuse_together(
        groups, sorted(set.union(*exchange(groups, here).values()) - here), opening
    )


def monitored_barrier(
    groups: Sequence[Group], call: str, *, has_facts: bool = False, how: str = ""
) -> list[Group]:
    """Waits until every rank of the groups has made the same call. All of them must call it.

    Args:
        groups: the groups to synchronize.
        call: the name of the call, for the message and for the keys in the store.
        has_facts: whether this rank has a fact to send. This is rare, so ranks exchange facts only if it is set.
        how: options of the call that must be equal on all ranks, as text.

    Returns:
        The groups in which any rank has set ``has_facts``; all ranks of a group return the same.

    Raises:
        RuntimeError: some rank did not arrive within the group's timeout. The message names the call and the ranks.
            Also raised if the ranks have issued different collectives before, or have different options.
    """
    for read in events.before_state_dict:
        read()
    return [group for group in groups if _any_has_facts(group, call, has_facts, how)]


def _any_has_facts(group: Group, call: str, has_facts: bool, how: str) -> bool:
    try:
        return _wait_for_all(group, call, has_facts, how)
    except dist.DistNetworkError:
        # The host of the store has ended. The ranks of this group can still exchange values in collectives.
        return any(exchange([group], has_facts).values())


def _wait_for_all(group: Group, call: str, has_facts: bool, how: str) -> bool:
    observer = None if events.barrier is None else events.barrier(group)
    store = group.process_group.get_group_store()
    # The number of arrivals in all calls so far. No further call can complete before this rank arrives.
    arrived = f"minifsdp/{call}/arrived"
    number = store.add(arrived, 0) // group.size
    key = f"minifsdp/{call}/{number}"
    order = "" if observer is None else observer.order
    store.set(f"{key}/{group.rank}", f"{int(has_facts)}{how}{order}")
    # With a counter, the number of messages per rank does not depend on the number of ranks.
    if store.add(arrived, 1) == (number + 1) * group.size:
        # Only the last rank reads what all ranks have written.
        texts = [
            text.decode()
            for text in store.multi_get(
                [f"{key}/{index}" for index in range(group.size)]
            )
        ]
        calls = sorted({text[1:] for text in texts})
        differs = (
            f"{calls[0]} on one rank, {calls[-1]} on another" if len(calls) > 1 else ""
        )
        store.set(f"{key}/complete", f"{max(texts)[0]} {differs}")
    begun = time.monotonic()
    limit = _time_limit(group)
    wait = _wait if observer is None else partial(observer.wait, _wait)
    try:
        wait(store, f"{key}/complete", limit, observer)
    except TimeoutError as error:
        report = "" if observer is None else observer.undo()
        missing = [
            rank
            for index, rank in enumerate(group.ranks)
            if not store.check([f"{key}/{index}"])
        ]
        # Undo this call, so that all ranks can call again.
        store.add(arrived, -1)
        store.delete_key(f"{key}/{group.rank}")
        raise RuntimeError(
            message(
                "missing-ranks",
                call=call,
                ranks=list(group.ranks),
                missing=missing,
                seconds=min(time.monotonic() - begun, limit),
                report=report,
            )
        ) from error
    store.delete_key(f"{key}/{group.rank}")
    # A fake store, of a group with simulated ranks, returns an empty text.
    any_has_facts, _, differs = store.get(f"{key}/complete").decode().partition(" ")
    if differs:
        report = "" if observer is None else observer.begin_epoch()
        raise RuntimeError(
            message("call-differs", call=call, differs=differs, report=report)
        )
    if group.rank == 0 and number:
        # No rank waits for the previous call any more.
        store.delete_key(f"minifsdp/{call}/{number - 1}/complete")
    return bool(any_has_facts == "1")


def _wait(store: Any, key: str, limit: float, observer: Any) -> None:
    """Polls for ``key``. The store's own wait would print a warning, and an observer could not end it."""
    until = time.monotonic() + limit
    pause = 0.001
    while not store.check([key]):
        if time.monotonic() > until or (observer is not None and observer.is_over()):
            raise TimeoutError
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def _time_limit(group: Group) -> float:
    """The timeout of the group in seconds, from ``init_process_group`` or ``new_group``."""
    process_group: Any = group.process_group
    try:
        device = torch.device(dist.get_backend_config(process_group).partition(":")[0])
        return process_group._get_backend(device).options._timeout.total_seconds()  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):
        return 1800.0
