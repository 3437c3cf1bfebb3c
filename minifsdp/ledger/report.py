"""What a rank knows of itself, where two ranks part, and the words for both.

A report answers three questions: where is every rank, who is missing, and what did the ranks do differently first?

Worked example. Rank 0 waits in the all-gather of ``layers.2``, rank 1 has gone on to save::

    rank 0: in forward, train.py:88, iteration 7; waits for all-gather of 'layers.2'
    rank 1: in state_dict, train.py:95, iteration 6; waits for all-gather in state_dict
    They part at collective 4 of group 0 since its last comparison:
    rank 0: all-gather of 'layers.2' in forward (train.py:88)
    rank 1: all-gather in state_dict (train.py:95)

Only ranks in the same epoch of a chain can be compared, see ``engine/ledger.py``. A rank that has issued less, and the
same so far, has not gone wrong: it has not come yet.

*In torch:* ``torchfrtrace`` compares the files of NCCL's flight recorder.

Spec: LEDGER-02, LEDGER-05, LEDGER-14.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, NamedTuple

from minifsdp.engine import ledger
from minifsdp.engine.ledger import Chain
from minifsdp.engine.messages import NOT_THE_PROGRAM, rank_of_this_process, way_out_of_main_thread
from minifsdp.ledger.board import Line, State

# Where the error was raised that ends this program.
failed_at = ""
# Why other ranks cannot be asked.
GONE = "Where the others are is not known: the host of the store, mostly rank 0, has ended."
SILENT = "Where the others are is not known: the store does not answer; its host, mostly rank 0, may be stopped."
MOST_RANKS = 16  # that are told of one by one
# How ranks end: one whose process is over and that has left no words, and one that a launcher ends.
LOST = "without words, mostly by SIGKILL or a crash: its process is over"
TOLD_TO_END = "by SIGTERM"


class Entry(NamedTuple):
    """One collective, as the ledger keeps it.

    Attributes:
        kind: in words, ``"all-gather"``.
        unit, parts: the unit that it is for, or ``None``; the numbers of its parameters that have a gradient.
        num_bytes: of the larger of its two sides.
        iteration: of this rank.
        group, epoch, number: its place: the name of the group's chain, the epoch, and the number in it.
        inside: what the program has called; ``None`` if that is not known.
        code, line: where in the program that was, innermost; ``None`` in a thread that the program has not begun.
    """

    kind: str
    unit: str | None
    parts: tuple[int, ...]
    num_bytes: int
    iteration: int
    group: str
    epoch: int
    number: int
    inside: CodeType | None
    code: CodeType | None
    line: int | None


def state_of_this_rank(ended: str = "") -> State:
    """Where this rank is: its main thread, its last collective, how far its chains are.

    Args:
        ended: why its program is over, if it is.
    """
    waits_for, last = getattr(ledger.waiting, "about", ""), ledger.entries[-1] if ledger.entries else None
    return {
        "rank": rank_of_this_process(),
        "ended": ended,
        "place": failed_at or _place_of_main_thread(),
        "iteration": ledger.iteration,
        "last": _what(Entry(*last)) if last else "",
        "waits": waits_for,
        "chains": {c.name: [[c.epoch, c.number, c.digest], c.last_epoch] for c in _chains()},
    }


def state_of_lost(rank: int) -> State:
    """What is left of a rank whose process is over, though it has not left any words."""
    return {"rank": rank, "ended": LOST, "place": "", "iteration": 0, "last": "", "waits": "", "chains": {}}


def lines_of_this_rank() -> list[Line]:
    """The last collectives of this rank, as the board has them: of this epoch of each chain, and of the one before."""
    oldest = {chain.name: chain.epoch - 1 for chain in _chains()}
    return [
        [e.group, e.epoch, e.number, _what(e), where(e.code, e.line), e.iteration, e.num_bytes]
        for e in itertools.starmap(Entry, tuple(ledger.entries))
        if e.epoch >= oldest.get(e.group, e.epoch + 1)
    ]


def _chains() -> list[Chain]:
    """Copied in one step: the main thread may be making a chain, and the dictionary's own iteration is Python."""
    return list(ledger.chains.data.values())  # type: ignore[attr-defined]


def _what(entry: Entry) -> str:
    if entry.unit is None:
        return f"{entry.kind} in {called(entry.inside)}"
    some = f", its parameters {list(entry.parts)}" if entry.parts else ""
    return f"{entry.kind} of {entry.unit!r}{some} in {called(entry.inside)}"


def where(code: CodeType | None, line: int | None) -> str:
    """A place in the program, ``train.py:88``."""
    return f"{Path(code.co_filename).name}:{line}" if code else "a thread of autograd"


def called(code: CodeType | None) -> str:
    """What the program has called: ``forward``, ``backward``, ``state_dict``, ``Linear()``."""
    if code is None:
        return "a thread"
    if code.co_name.endswith("_call_impl"):
        return "forward"
    return f"{code.co_qualname.split('.')[-2:][0]}()" if code.co_name == "__init__" else code.co_name


def _place_of_main_thread() -> str:
    inside, code, line = way_out_of_main_thread()
    if code is None or inside is None:
        return "outside of the program"
    place, name = where(code, line), called(inside)
    # What begins with an underscore is not called by programs, but say a handler of a signal.
    return place if inside is code or name.startswith("_") else f"in {name}, {place}"


def place_of(trace: TracebackType | None) -> str:
    """Where in the program an error was raised, and by what the program has called there."""
    place, inside = "outside of the program", None
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in NOT_THE_PROGRAM:
            place, inside = where(trace.tb_frame.f_code, trace.tb_lineno), None
        elif inside is None:
            inside = trace.tb_frame.f_code
        trace = trace.tb_next
    return f"in {called(inside)}, {place}" if inside else place


def unlike(chain: Chain, epoch: int, states: Mapping[int, State | None]) -> tuple[int, list[int]]:
    """Which ranks to compare, and in which epoch: one for each state that the chain has.

    Args:
        chain, epoch: where to look; or in an earlier epoch, if another rank is still there.
        states: of all ranks, of which those of the chain's group count.
    """
    of_group = {
        rank: state["chains"].get(chain.name) for rank, state in states.items() if state and rank in chain.ranks
    }
    both_of = {rank: both for rank, both in of_group.items() if both}
    epoch = min([epoch, *(now[0] for now, _ in both_of.values())])
    first: dict[Any, int] = {}
    for rank, both in both_of.items():
        first.setdefault(next((tuple(at) for at in both if at[0] == epoch), None), rank)
    return epoch, list(first.values())


def parting(name: str, epoch: int, lists: Mapping[int, list[Line]]) -> dict[int, Line]:
    """The first place in a chain where ranks have issued different collectives; empty if there is none to be seen.

    Args:
        name, epoch: where to look.
        lists: the last collectives of the ranks to compare.

    Returns:
        What each of them has issued at that place.
    """
    of_epoch = {rank: {line[2]: line for line in lines if line[:2] == [name, epoch]} for rank, lines in lists.items()}
    for number in sorted({number for of_rank in of_epoch.values() for number in of_rank}):
        there = {rank: of_rank[number] for rank, of_rank in of_epoch.items() if number in of_rank}
        if len({line[3] for line in there.values()}) > 1:
            return there
    return {}


def in_words(states: Mapping[int, State | None], parted: Mapping[int, Line], store: str = "") -> str:
    """The report.

    Args:
        states: of all ranks; ``None`` for those who have not answered.
        parted: see `parting`.
        store: why no other rank could be asked, if that is so.
    """
    who: dict[str, list[int]] = {}
    for rank, state in states.items():
        who.setdefault(_of_rank(state), []).append(rank)
    said = [f"{_ranks(ranks)}: {text}" for text, ranks in sorted(who.items(), key=lambda item: item[1])]
    lines = ["Where every rank is:", *said[:MOST_RANKS]]
    if len(said) > MOST_RANKS:
        lines.append(f"and {len(said) - MOST_RANKS} more")
    if parted:
        chain, _, number = next(iter(parted.values()))[:3]
        lines.append(f"The ranks part at collective {number} of group {chain} since its last comparison:")
        lines += [f"rank {rank}: {what} ({at})" for rank, (_, _, _, what, at, *_) in parted.items()]
    return "\n".join([*lines, store]).rstrip()


def _of_rank(state: State | None) -> str:
    if state is None:
        return "says nothing: it is stopped, has made no unit yet, is stuck without Python, or its machine is lost"
    if state["ended"] not in ("", TOLD_TO_END):
        return f"has ended, {state['ended']}"
    doing = f"waits for {state['waits']}" if state["waits"] else f"last sent: {state['last'] or 'nothing'}"
    told = "; told to end by SIGTERM" if state["ended"] else ""
    return f"{state['place']}, iteration {state['iteration']}; {doing}{told}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
