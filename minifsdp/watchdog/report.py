"""The states of all ranks: how they are exchanged, the position where two ranks diverge, and the text of a report.

A report answers three questions: where is every rank, which rank is missing, and which collectives differ first?

Worked example. Rank 0 waits in the all-gather of ``layers.2``, rank 1 has continued with ``state_dict()``::

    rank 0: in forward, train.py:88, iteration 7; waits for all-gather of 'layers.2'
    rank 1: in state_dict, train.py:95, iteration 6; waits for all-gather in state_dict
    The ranks diverge at collective 4 of group 0 since its last comparison:
    rank 0: all-gather of 'layers.2' in forward (train.py:88)
    rank 1: all-gather in state_dict (train.py:95)

Only ranks in the same epoch of the same sequence are compared, see ``checks/collective_log.py``, and only by the
identities of their collectives. A rank that issued fewer collectives, but equal ones so far, is late.

A killed rank leaves no exit record. A missing answer does not prove that a rank was killed, because a stopped process
does not answer either. So each rank publishes its machine and process number, and if it does not answer, a rank on
the same machine checks its process. If a machine is lost, the others wait until their timeout.

The ranks exchange states through the store of ``torch.distributed``, a dictionary that all ranks reach on a separate
connection. It works even if collectives do not::

    asked      3             number of questions so far; any rank increases it
    host       0             1 as soon as the rank that hosts the store has exited
    destroyed  0             number of ranks that have destroyed the group
    0/process  [...]         machine and process of rank 0
    0/state    {...}         state of rank 0, and the number of the question that it answers
    0/wanted   1             how often other ranks asked for the list of rank 0
    0/list     {...}         the last collectives of rank 0, one line each

A rank that needs the states of the others increases ``asked``. Every watchdog reads the new number within a tick and
publishes its state, about one hundred bytes. A list is long, so a rank requests only a few of them. A rank that ends
publishes an *exit record*, a state that answers all questions.

*In torch:* ``torchfrtrace`` compares the files of NCCL's flight recorder.

Spec: LEDGER-02, LEDGER-04, LEDGER-05, LEDGER-13, LEDGER-14, LEDGER-16, LEDGER-18, HEALTHY-01, HEALTHY-06.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from minifsdp.checks.collective_log import (
    CollectiveSequence,
    Position,
    as_line,
    log,
)
from minifsdp.checks.place import place_as_text, way_out_of_main_thread
from minifsdp.engine.messages import rank_of_this_process
from minifsdp.watchdog.linux import has_ended, this_process

State = dict[str, Any]
Line = list[
    Any
]  # sequence, epoch, number, what, where, iteration, bytes, identity, number of the unit
IDENTITY = 7
OF_UNIT = 8  # the fields of a line that are compared
EXIT_RECORD = 1 << 60  # the number of an answer to all questions
HASTE = 0.05  # seconds between two reads while answers are expected
_DESTROYED = "destroyed"  # the key that counts the ranks that have destroyed the group
_HOST = 0  # the rank that hosts the store, if no launcher does
# The reason if other ranks cannot be queried.
GONE = "The state of the other ranks is unknown: the host of the store, usually rank 0, has ended."
SILENT = "The state of the other ranks is unknown: the store does not answer. Its host is stopped or out of reach."
MOST_RANKS = 16  # lines of a report
LOST = "without an exit record, usually by a signal or a crash: its process no longer exists"
IN_ORDER = "at the end of its program"


def state_of_this_rank(ended: str = "", failed_at: str = "") -> State:
    """The state of this rank: the line of its main thread, its last collective, the position of each sequence.

    Args:
        ended: the reason why its program has ended; empty if the program runs.
        failed_at: the line that raised the error that ended the program.
    """
    work = log.waiting
    latest = log.latest  # read once: the main thread changes them
    return {
        "rank": rank_of_this_process(),
        "ended": ended,
        "place": failed_at or place_as_text(*way_out_of_main_thread()),
        "iteration": log.iteration,
        "last": as_line(latest[0].entries[-1])[3]
        if latest and latest[0].entries
        else "",
        "waits": work.about if work else "",
        "waits_at": [
            work.position[0].key,
            list(work.position[0].ranks),
            work.position[1:],
        ]
        if work
        else None,
        "sequences": {one.key: [one.now, one.last_epoch] for one in _sequences()},
    }


def lines_of_this_rank() -> list[Line]:
    """The last collectives of this rank, in the current and the previous epoch of each sequence."""
    return [
        as_line(entry)
        for sequence in _sequences()
        for entry in tuple(sequence.entries)
        if entry[1] >= sequence.now[0] - 1
    ]


def _sequences() -> list[CollectiveSequence]:
    """The sequences, copied in one step, because the main thread may create a sequence at the same time."""
    return list(log.sequences.data.values())  # type: ignore[attr-defined]


def different_ranks(
    sequence: CollectiveSequence, epoch: int, states: Mapping[int, State | None]
) -> tuple[int, list[int]]:
    """The epoch in which to compare the ranks, and one rank for each different position of the sequence.

    Args:
        sequence, epoch: the position; an earlier epoch is chosen if another rank is still there.
        states: the states of all ranks; only those of the sequence's group are used.
    """
    both_of = {
        rank: state["sequences"][sequence.key]
        for rank in sequence.ranks
        if (state := states.get(rank)) and sequence.key in state["sequences"]
    }
    epoch = min([epoch, *(now[0] for now, _ in both_of.values())])
    first: dict[Any, int] = {}
    for rank, both in both_of.items():
        first.setdefault(next((tuple(at) for at in both if at[0] == epoch), None), rank)
    return epoch, list(first.values())


def divergence(
    key: str, epoch: int, lists: Mapping[int, list[Line]], what: int = IDENTITY
) -> dict[int, Line]:
    """The first position of a sequence where ranks issued different collectives; empty if there is none.

    Args:
        key, epoch: of the sequence.
        lists: the last collectives of the ranks to compare.
        what: the field of their lines to compare, `IDENTITY` or `OF_UNIT`.

    Returns:
        The collective of each of these ranks at that position.
    """
    of_epoch = {
        rank: {line[2]: line for line in lines if line[:2] == [key, epoch]}
        for rank, lines in lists.items()
    }
    for number in sorted(
        {number for of_rank in of_epoch.values() for number in of_rank}
    ):
        there = {
            rank: of_rank[number]
            for rank, of_rank in of_epoch.items()
            if number in of_rank
        }
        if len({line[what] for line in there.values()}) > 1:
            return there
    return {}


def _of_rank(state: State | None) -> str:
    if state is None:
        return "no answer: it is stopped, has sharded no model, is blocked outside of Python, or its machine is lost"
    if state["ended"]:
        return f"has ended, {state['ended']}" + (
            f" ({state['place']})" if state["ended"].startswith("by ") else ""
        )
    doing = (
        f"waits for {state['waits']}"
        if state["waits"]
        else f"last sent: {state['last'] or 'nothing'}"
    )
    return f"{state['place']}, iteration {state['iteration']}; {doing}"


class Findings(NamedTuple):
    """The answers to a question.

    Attributes:
        states: the states of all ranks; ``None`` for those without an answer.
        lists: the last collectives of some ranks.
        diverging: the collectives of these ranks at the position where they diverge, see `divergence`.
        other_units: the same for collectives of different units, which are usually the cause at an earlier position.
        why: the reason if no other rank could be queried.
    """

    states: Mapping[int, State | None]
    lists: Mapping[int, list[Line]] = {}
    diverging: Mapping[int, Line] = {}
    other_units: Mapping[int, Line] = {}
    why: str = ""

    def text(self) -> str:
        """The text of the report."""
        ranks_of: dict[str, list[int]] = {}
        for rank, state in self.states.items():
            ranks_of.setdefault(_of_rank(state), []).append(rank)
        said = [
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
            for text, ranks in sorted(ranks_of.items(), key=lambda item: item[1])
        ]
        lines = ["Where every rank is:", *said[:MOST_RANKS]]
        if len(said) > MOST_RANKS:
            lines.append(f"and {len(said) - MOST_RANKS} more")
        both = filter(None, (self.diverging, self.other_units))
        if found := min(
            both, key=lambda lines: next(iter(lines.values()))[2], default=None
        ):
            key, _, number = next(iter(found.values()))[:3]
            lines += [
                f"The ranks diverge at collective {number} of group {key.partition('#')[0]} since its last comparison:",
                *(
                    f"rank {rank}: {line[3]} ({line[4]})"
                    for rank, line in found.items()
                ),
            ]
        return "\n".join([*lines, self.why]).rstrip()

    def prove_a_hang(self, position: Position, *, on_cpu: bool) -> bool:
        """Whether two ranks diverge, or a rank has ended without the collective at ``position``.

        On a CPU, a process that ends in order has sent everything that it issued. A process that failed may not have
        sent everything. On an accelerator, all kernels end with the process.
        """
        sequence, *at = position
        ended = [
            state
            for rank in sequence.ranks
            if (state := self.states[rank]) and state["ended"]
        ]
        have_sent = [
            state
            for state in ended
            if on_cpu
            and state["ended"] == IN_ORDER
            and state["sequences"].get(sequence.key, [[]])[0][:2] > at
        ]
        return (
            bool(self.diverging)
            or len(ended) > len(have_sent)
            or (
                on_cpu
                and any(self._wait_for_each_other(position, r) for r in sequence.ranks)
            )
        )

    def _wait_for_each_other(self, position: Position, rank: int) -> bool:
        """Whether ``rank`` waits for this rank in another group, and neither has issued the collective of the other."""
        sequence, *at = position
        me = rank_of_this_process()
        mine = self.states[me] or {"sequences": {}}
        other = self.states[rank] or {}
        key, ranks, there = other.get("waits_at") or (sequence.key, (), [])
        if key == sequence.key or me not in ranks:
            return False
        # A sequence without any collective is behind every position.
        others, own = (
            one["sequences"].get(k, [[]])[0][:2]
            for one, k in ((other, sequence.key), (mine, key))
        )
        return bool(others <= at and own <= there)


def comes_true(condition: Callable[[], bool], limit: float) -> bool:
    """Whether ``condition`` returns true at least once before ``limit`` seconds have passed."""
    until = time.monotonic() + limit
    while not (is_true := condition()) and time.monotonic() <= until:
        time.sleep(HASTE)
    return is_true


class StoreChannel:
    """The keys of this package in the store of one default process group. Only the watchdog thread may use it.

    If the host of the store is stopped, calls do not return. If it has ended, this call and all later ones raise an
    error. Later calls send nothing, because C++ would print a warning for each message.

    Args:
        store: the store of the default group; only a copy of it is kept.
        meanwhile: called while this rank waits for other ranks, because they may be waiting for this rank.

    Attributes:
        rank, num_ranks: the rank of this process, and the number of all ranks.
        is_gone: whether the host of the store has ended.
        of_host: the exit record of the store's host, if it left one.
    """

    def __init__(self, store: Any, meanwhile: Callable[[], None]) -> None:
        self._of_group = store.clone() if hasattr(store, "clone") else store
        self._store = dist.PrefixStore("minifsdp/ledger", self._of_group)
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self._meanwhile = meanwhile
        self.is_gone = self._is_open = False
        self.of_host: State | None = None

    def ask(self) -> int:
        """Asks all ranks for their state; returns the number of the question."""
        return int(self._call("add", "asked", 1))

    def requests(self) -> dict[str, int]:
        """The number of questions so far, and how often other ranks asked for this rank's list."""
        counts = ["asked", f"{self.rank}/wanted", "host"]
        if not self._is_open:
            # Reading a key that does not exist would block.
            for count in counts:
                self._call("add", count, 0)
            self._call("set", f"{self.rank}/process", json.dumps(this_process()))
            self._is_open = True
        asked, wanted, has_left = map(int, self._call("multi_get", counts))
        if has_left and self.of_host is None:
            # Kept, because the store ends with its host.
            self.of_host = self._read(f"{_HOST}/state")
        return {"state": asked, "list": wanted}

    def publish(self, rank: int, what: str, number: int, answer: State) -> None:
        """Publishes the state or the list of a rank, as the answer to all requests up to ``number``."""
        self._call("set", f"{rank}/{what}", json.dumps({**answer, "answers": number}))

    def announce_exit(self) -> None:
        """Notifies all ranks that the host of the store exits; its exit record is already published."""
        self._call("add", "host", 1)

    def states(self, number: int, limit: float) -> dict[int, State | None]:
        """The answer of each rank to question ``number``; ``None`` if there is none after ``limit`` seconds."""
        return self._answers(
            "state", dict.fromkeys(range(self.num_ranks), number), limit
        )

    def lists(self, ranks: Iterable[int], limit: float) -> dict[int, list[Line]]:
        """The last collectives of some ranks, without ranks that do not answer within ``limit`` seconds."""
        wanted = {rank: int(self._call("add", f"{rank}/wanted", 1)) for rank in ranks}
        return {
            rank: answer["lines"]
            for rank, answer in self._answers("list", wanted, limit).items()
            if answer
        }

    def is_lost(self, rank: int) -> bool:
        """Whether the process of a rank ran on this machine and has ended."""
        return (process := self._read(f"{rank}/process")) is not None and has_ended(
            process
        )

    def delete_keys(self, limit: float) -> None:
        """Deletes the keys of the destroyed group, once all ranks have destroyed it. Waits for them up to ``limit``.

        A store may outlive the group, such as the store of torchrun. The next group then has the same keys, and a rank
        would connect to the addresses that gloo has stored for the destroyed group.

        Raises:
            Exception: if the store has no list of its keys, or its host has ended.
        """
        # Called first, so that all ranks raise before they count, if the store has no list.
        self._of_group.list_keys()
        if int(self._call("add", _DESTROYED, 1)) == self.num_ranks:
            for key in self._of_group.list_keys():
                if not key.endswith(_DESTROYED):
                    self._of_group.delete_key(key)
            self._call("delete_key", _DESTROYED)
            return

        def are_deleted() -> bool:
            return not self._call("check", [_DESTROYED])

        # The last rank deletes the keys only if it counts all others. It may be doing this when this rank leaves.
        if (
            not comes_true(are_deleted, limit)
            and int(self._call("add", _DESTROYED, -1)) == self.num_ranks - 1
        ):
            comes_true(are_deleted, limit)

    def _answers(
        self, what: str, numbers: Mapping[int, int], limit: float
    ) -> dict[int, State | None]:
        found: dict[int, State | None] = dict.fromkeys(numbers)

        def are_complete() -> bool:
            self._meanwhile()
            for rank in [rank for rank, answer in found.items() if answer is None]:
                answer = self._read(f"{rank}/{what}")
                if answer is not None and answer["answers"] >= numbers[rank]:
                    found[rank] = answer
            return None not in found.values()

        comes_true(are_complete, limit)
        return found

    def _read(self, key: str) -> Any:
        """The value of ``key``, or ``None``."""
        return (
            json.loads(self._call("get", key)) if self._call("check", [key]) else None
        )

    def _call(self, name: str, *arguments: Any) -> Any:
        if self.is_gone:
            raise ConnectionError
        try:
            return getattr(self._store, name)(*arguments)
        except (RuntimeError, ValueError, OSError):
            self.is_gone = True
            raise
