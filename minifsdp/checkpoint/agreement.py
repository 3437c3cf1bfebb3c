"""What ranks agree on before a state dict is written or read: who is there, who has what, and who refuses.

Saving and loading are done once in an hour, so they can afford what a training step cannot: small conversations of
Python objects, held *before* the first tensor is sent. Each answers one question that would otherwise be answered by a
hang:

* `monitored_barrier`: are all ranks here? ``state_dict()`` gathers, so all must call it; the favourite mistake is to
  call it under ``if rank == 0``. Every rank leaves its name in the group's store and waits there for the others.
* `tell`: who has what? An optimizer may have a state here and none there.
* `refuse_together`: does anybody refuse? A rank that raises while the others go on into a collective looks like a hang.

Worked example, four ranks with the shard groups (0 1) and (2 3), a fact known on rank 3 only::

    told in the shard groups        2 and 3 know it
    told in the replicate groups    1 has heard it from 3, 0 from 2: everybody knows it

That is why a model with a hybrid strategy needs no group of all its ranks: two rounds in small groups do.

The store is the one through which the ranks found each other. It works for every backend, also where the ranks could
not send each other anything any more. It also counts who has come, so that no rank has a count of its own that could
differ from another's. Cost of a barrier: six messages from each rank to the store, 0.2 ms on one machine. A rank with
something rare to tell raises its hand in it, and only then the others listen.

*In torch:* nothing of the kind; a lone ``state_dict()`` ends in the backend's own time-out, which names neither the
call nor the missing ranks, and a rank that refuses leaves the others waiting.

Spec: SD-FULL-03, SD-FULL-05, SD-FULL-09, OSD-FULL-02.
"""

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from minifsdp.engine import collectives, comparison, ledger
from minifsdp.engine.mesh import Group, Mesh
from minifsdp.engine.messages import message, rank_of_this_process

T = TypeVar("T")
# A dict of another model can be wrong in every key, and on a thousand ranks.
MOST_LINES = 10


class StateDictMismatchError(RuntimeError, ValueError):
    """A state dict does not fit. ``nn.Module`` reports that as one of the two kinds, optimizers as the other."""


def groups_of(meshes: Iterable[Mesh]) -> list[Group]:
    """The groups of all meshes, each once: shard groups first. Equal on all ranks that build equal trees.

    Groups of a simulation are left out.
    """
    chosen = list(meshes)
    groups = [mesh.shard for mesh in chosen] + [mesh.replicate for mesh in chosen]
    return list(dict.fromkeys(group for group in groups if group is not None and _can_talk(group)))


def _can_talk(group: Group) -> bool:
    # Not in a simulation, where one process plays all ranks and nothing is sent.
    try:
        return bool(dist.get_backend(group.process_group) != "fake")
    except (KeyError, RuntimeError, TypeError, ValueError):
        return False


def tell(groups: Sequence[Group], mine: T) -> dict[int, T]:
    """What every rank of the groups says, by global rank. All of them must call it.

    With several groups the word is spread from each to the next.
    """
    known = {rank_of_this_process(): mine}
    for group in groups:
        others: list[Any] = [None] * group.size
        collectives.call(dist.all_gather_object, group, others, known)
        for other in others:
            known.update(other)
    return dict(sorted(known.items()))


def refuse_together(groups: Sequence[Group], problems: Sequence[str], opening: str = "") -> None:
    """Raises on every rank if any rank has a problem. All ranks of the groups must call it.

    Args:
        groups: who must agree; with none of them only this rank is asked.
        problems: what is wrong on this rank; each names the key, what was expected and what was found.
        opening: words in front that programs may know.

    Raises:
        StateDictMismatchError: some rank has a problem. The message says which rank has which.
    """
    who: dict[str, list[str]] = {}
    for rank, found in tell(groups, list(problems)).items():
        for problem in found:
            who.setdefault(problem, []).append(f"rank {rank}")
    if not who:
        return
    lines = [f"{some(ranks)}: {problem}" for problem, ranks in who.items()]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more"]
    where = " on every rank" if groups else ""
    raise StateDictMismatchError(message("state-dict-refused", opening=opening, where=where, lines="\n".join(lines)))


def refuse_lacking(groups: Sequence[Group], mine: Iterable[str], opening: str = "") -> None:
    """Raises on every rank if any rank lacks something that others have. All ranks of the groups must call it.

    Args:
        groups: who must agree.
        mine: for each thing that this rank has, what is to be said of a rank that has it not.
        opening: see `refuse_together`.

    Raises:
        StateDictMismatchError: some rank lacks something.
    """
    here = set(mine)
    everywhere = set.union(*tell(groups, here).values())
    refuse_together(groups, sorted(everywhere - here), opening)


def some(words: Sequence[str], most: int = MOST_LINES) -> str:
    """The first words of a list that may be long, and how many more there are."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def monitored_barrier(groups: Sequence[Group], call: str, *, raises_hand: bool = False) -> list[Group]:
    """Waits until every rank of the groups has made the same call. All of them must call it.

    Args:
        groups: who must come.
        call: what they must call, for the message.
        raises_hand: whether this rank has something to tell, which is rare, so that others listen only then.

    Returns:
        Those of the groups in which any rank has raised its hand; all ranks of a group agree on that.

    Raises:
        RuntimeError: some rank did not come within the group's time limit. The message names the call and the ranks.
            Or the ranks have not sent the same before.
    """
    comparison.read_all()
    return [group for group in groups if _meets_all(group, call, raises_hand)]


def _meets_all(group: Group, call: str, raises_hand: bool) -> bool:
    try:
        return _wait_for_all(group, call, raises_hand)
    except dist.DistNetworkError:
        # The host of the store has ended. The ranks of this group can still exchange what they have to tell.
        return any(tell([group], raises_hand).values())


def _wait_for_all(group: Group, call: str, raises_hand: bool) -> bool:
    store = group.process_group.get_group_store()
    # Of all calls so far. While this rank has not come, no further call can be complete.
    arrived = f"minifsdp/{call}/arrived"
    number = store.add(arrived, 0) // group.size
    key = f"minifsdp/{call}/{number}"
    store.set(f"{key}/{group.rank}", "")
    if raises_hand:
        store.set(f"{key}/hand", "")
    # Counting here, instead of waiting for each name there, keeps it at a few messages however many ranks there are.
    if store.add(arrived, 1) == (number + 1) * group.size:
        store.set(f"{key}/complete", "")
    begun, limit, place = time.monotonic(), _time_limit(group), group.chain.place()
    try:
        # In the ledger like a collective: others can see that this rank waits, and for what.
        ledger.Collective("barrier", group, 0, _wait, store, f"{key}/complete", limit)
    except TimeoutError as error:
        seconds = min(time.monotonic() - begun, limit.total_seconds())
        ranks, report = list(group.ranks), ledger.explained((group.chain, group.chain.epoch, group.chain.number - 1))
        present = [store.check([f"{key}/{index}"]) for index in range(group.size)]
        missing = [rank for rank, is_here in zip(ranks, present, strict=True) if not is_here]
        # Leaves no trace, so that the next call of everybody is a new one, and all ranks have sent the same.
        group.chain.return_to(place)
        store.add(arrived, -1)
        store.delete_key(f"{key}/{group.rank}")
        raise RuntimeError(
            message("missing-ranks", call=call, ranks=ranks, missing=missing, seconds=seconds, report=report)
        ) from error
    store.delete_key(f"{key}/{group.rank}")
    has_hands: bool = store.check([f"{key}/hand"])
    if group.rank == 0 and number:
        # No rank waits for the call before this one any more.
        for mark in ("complete", "hand"):
            store.delete_key(f"minifsdp/{call}/{number - 1}/{mark}")
    return has_hands


def _wait(store: Any, key: str, limit: timedelta) -> None:
    """Waits for ``key``; not in the store, which would write a warning, and could not be told that it will not come."""
    until, pause = time.monotonic() + limit.total_seconds(), 0.001
    while not store.check([key]):
        if time.monotonic() > until or ledger.verdict:
            raise TimeoutError
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def _time_limit(group: Group) -> timedelta:
    """The group's own: what was passed to ``init_process_group`` or ``new_group``."""
    process_group: Any = group.process_group
    try:
        limit: timedelta = process_group._get_backend(process_group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return timedelta(minutes=30)
    return limit
