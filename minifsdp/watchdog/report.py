"""The state of this rank, the position where two ranks diverge, and the text of a report.

A report answers three questions: where is every rank, which rank is missing, and which collectives differ first?

Worked example. Rank 0 waits in the all-gather of ``layers.2``, rank 1 has continued with ``state_dict()``::

    rank 0: in forward, train.py:88, iteration 7; waits for all-gather of 'layers.2'
    rank 1: in state_dict, train.py:95, iteration 6; waits for all-gather in state_dict
    The ranks diverge at collective 4 of group 0 since its last comparison:
    rank 0: all-gather of 'layers.2' in forward (train.py:88)
    rank 1: all-gather in state_dict (train.py:95)

Only ranks in the same epoch of the same sequence are compared, see ``engine/collective_log.py``, and only by the
identities of their collectives. A rank that issued fewer collectives, and equal ones so far, is late.

A killed rank leaves no exit record, and a missing answer is no proof: a stopped process does not answer either. But the
operating system lists its processes. So each rank publishes its machine and process number, and if it does not answer,
a rank on the same machine checks its process. If a machine is lost, the others wait until their timeout.

The report is part of an error, and is written to a file, which ``python -m minifsdp.ledger`` draws.

*In torch:* ``torchfrtrace`` compares the files of NCCL's flight recorder.

Spec: LEDGER-02, LEDGER-05, LEDGER-07, LEDGER-14, LEDGER-17, LEDGER-18, LEDGER-20, HEALTHY-01.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from minifsdp.engine.collective_log import CollectiveSequence, Entry, log
from minifsdp.engine.messages import NOT_THE_PROGRAM, rank_of_this_process, way_out_of_main_thread

State = dict[str, Any]
Line = list[Any]  # sequence, epoch, number, what, where, iteration, bytes, identity
Process = list[str]  # machine and number
FOLDER = "MINIFSDP_LEDGER_DIR"
_SYSTEM = Path("/proc")
# Why other ranks cannot be asked.
GONE = "The state of the other ranks is unknown: the host of the store, usually rank 0, has ended."
SILENT = "The state of the other ranks is unknown: the store does not answer. Its host, usually rank 0, may be stopped."
MOST_RANKS = 16  # lines of a report
# How ranks end: without an exit record, and by the signal of a launcher.
LOST = "without an exit record, usually by SIGKILL or a crash: its process no longer exists"
ENDED_BY_LAUNCHER = "by SIGTERM"
IN_ORDER = "at the end of its program"


def state_of_this_rank(ended: str = "", failed_at: str = "") -> State:
    """The state of this rank: the line of its main thread, its last collective, the position of each sequence.

    Args:
        ended: why its program has ended, if it has.
        failed_at: the line that raised the error that ended it.
    """
    waits_for, last = getattr(log.waiting, "about", ""), log.entries[-1] if log.entries else None
    return {
        "rank": rank_of_this_process(),
        "ended": ended,
        "place": failed_at or _place_of_main_thread(),
        "iteration": log.iteration,
        "last": _what(Entry(*last)) if last else "",
        "waits": waits_for,
        "sequences": {one.key: [[one.epoch, one.number, one.digest], one.last_epoch] for one in _sequences()},
    }


def state_of_lost(rank: int) -> State:
    """The exit record of a rank whose process has ended without one."""
    return {"rank": rank, "ended": LOST, "place": "", "iteration": 0, "last": "", "waits": "", "sequences": {}}


def lines_of_this_rank() -> list[Line]:
    """The last collectives of this rank, of this epoch of each sequence and of the one before."""
    oldest = {sequence.key: sequence.epoch - 1 for sequence in _sequences()}
    return [
        [e.group, e.epoch, e.number, _what(e), where(e.code, e.line), e.iteration, e.num_bytes, e.identity]
        for e in itertools.starmap(Entry, tuple(log.entries))
        if e.epoch >= oldest.get(e.group, e.epoch + 1)
    ]


def _sequences() -> list[CollectiveSequence]:
    """Copied in one step, because the main thread may create a sequence at the same time."""
    return list(log.sequences.data.values())  # type: ignore[attr-defined]


def _what(entry: Entry) -> str:
    if entry.unit is None:
        return f"{entry.kind} in {called(entry.inside)}"
    some = f", its parameters {list(entry.parts)}" if entry.parts else ""
    return f"{entry.kind} of {entry.unit!r}{some} in {called(entry.inside)}"


def where(code: CodeType | None, line: int | None) -> str:
    """A line of the program, ``train.py:88``."""
    return f"{Path(code.co_filename).name}:{line}" if code else "a thread of autograd"


def called(code: CodeType | None) -> str:
    """The function that the program called: ``forward``, ``backward``, ``state_dict``, ``Linear()``."""
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
    # A function whose name begins with an underscore is not called by the program, but for instance by a signal.
    return place if inside is code or name.startswith("_") else f"in {name}, {place}"


def line_of(trace: TracebackType | None) -> str:
    """The line of the program that raised an error, and the function that it called."""
    place, inside = "outside of the program", None
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in NOT_THE_PROGRAM:
            place, inside = where(trace.tb_frame.f_code, trace.tb_lineno), None
        elif inside is None:
            inside = trace.tb_frame.f_code
        trace = trace.tb_next
    return f"in {called(inside)}, {place}" if inside else place


def different_ranks(
    sequence: CollectiveSequence, epoch: int, states: Mapping[int, State | None]
) -> tuple[int, list[int]]:
    """The epoch in which to compare the ranks, and one rank for each different position of the sequence.

    Args:
        sequence, epoch: the position; an earlier epoch is chosen if another rank is still there.
        states: of all ranks. Only those of the sequence's group count.
    """
    of_group = [(rank, state) for rank in sequence.ranks if (state := states.get(rank))]
    both_of = {rank: both for rank, state in of_group if (both := state["sequences"].get(sequence.key))}
    epoch = min([epoch, *(now[0] for now, _ in both_of.values())])
    first: dict[Any, int] = {}
    for rank, both in both_of.items():
        first.setdefault(next((tuple(at) for at in both if at[0] == epoch), None), rank)
    return epoch, list(first.values())


def has_issued(state: State, key: str, epoch: int, number: int) -> bool:
    """Whether a rank that has ended in order issued a collective before. One that failed may not have completed it."""
    position = state["sequences"].get(key)
    return state["ended"] == IN_ORDER and position is not None and position[0][:2] > [epoch, number]


def divergence(key: str, epoch: int, lists: Mapping[int, list[Line]]) -> dict[int, Line]:
    """The first position of a sequence where ranks issued different collectives; empty if there is none.

    Args:
        key, epoch: of the sequence.
        lists: the last collectives of the ranks to compare.

    Returns:
        The collective of each of them at that position.
    """
    of_epoch = {rank: {line[2]: line for line in lines if line[:2] == [key, epoch]} for rank, lines in lists.items()}
    for number in sorted({number for of_rank in of_epoch.values() for number in of_rank}):
        there = {rank: of_rank[number] for rank, of_rank in of_epoch.items() if number in of_rank}
        if len({line[7] for line in there.values()}) > 1:
            return there
    return {}


def in_words(states: Mapping[int, State | None], diverging: Mapping[int, Line], store: str = "") -> str:
    """The text of the report.

    Args:
        states: of all ranks; ``None`` for those without an answer.
        diverging: see `divergence`.
        store: why no other rank could be asked, if so.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, state in states.items():
        ranks_of.setdefault(_of_rank(state), []).append(rank)
    said = [f"{_ranks(ranks)}: {text}" for text, ranks in sorted(ranks_of.items(), key=lambda item: item[1])]
    lines = ["Where every rank is:", *said[:MOST_RANKS]]
    if len(said) > MOST_RANKS:
        lines.append(f"and {len(said) - MOST_RANKS} more")
    if diverging:
        key, _, number = next(iter(diverging.values()))[:3]
        group = key.partition("#")[0]
        lines.append(f"The ranks diverge at collective {number} of group {group} since its last comparison:")
        lines += [f"rank {rank}: {what} ({at})" for rank, (_, _, _, what, at, *_) in diverging.items()]
    return "\n".join([*lines, store]).rstrip()


def _of_rank(state: State | None) -> str:
    if state is None:
        return "no answer: it is stopped, has sharded no model, is blocked outside of Python, or its machine is lost"
    if state["ended"] not in ("", ENDED_BY_LAUNCHER):
        return f"has ended, {state['ended']}" + (f" ({state['place']})" if state["ended"].startswith("by ") else "")
    doing = f"waits for {state['waits']}" if state["waits"] else f"last sent: {state['last'] or 'nothing'}"
    ending = "; got SIGTERM" if state["ended"] else ""
    return f"{state['place']}, iteration {state['iteration']}; {doing}{ending}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


# --- files ---


def written(
    states: Mapping[int, State | None], lists: Mapping[int, list[Line]], diverging: Mapping[int, Line], why: str = ""
) -> str:
    """The report. It is also written to a file, and the last line names the file."""
    words = in_words(states, diverging, why)
    if os.environ.get(FOLDER) == "off":
        return words
    try:
        path = _write(json.dumps({"states": states, "lines": lists, "diverging": diverging}))
    except OSError as error:
        return f"{words}\n(could not be written to a file: {error})"
    return f"{words}\nTo draw it: python -m minifsdp.ledger {path}"


def _write(text: str) -> Path:
    """A new file that only this user can read, in `FOLDER` or in a new folder. Texts of exceptions may hold secrets."""
    folder = Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="minifsdp-"))
    # Two jobs without an id, two lives of a job, and two reports of a process write to different files.
    run, life = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    stem = f"minifsdp-ledger-{run}-{life}-rank{rank_of_this_process()}-{os.getpid()}"
    names = (f"{stem}{f'-{number}' if number else ''}.json" for number in range(100))
    for path in map(folder.joinpath, names):
        with suppress(FileExistsError):
            end = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(end, "w", encoding="utf-8") as file:
                file.write(text)
            return path
    raise FileExistsError


# --- processes of this machine ---


def this_process() -> Process:
    """Machine and number of this process; the machine is empty if unknown, as on systems other than Linux.

    The machine is its boot ID and the PID namespace, which differs between two containers on one machine.
    """
    try:
        boot = (_SYSTEM / "sys/kernel/random/boot_id").read_text().strip()
        return [f"{boot} {(_SYSTEM / 'self/ns/pid').readlink()}", str(os.getpid())]
    except OSError:
        return ["", str(os.getpid())]


def has_ended(process: Process) -> bool:
    """Whether a process of this machine has ended, including a process that its parent has not reaped yet."""
    machine, number = process
    if not machine or machine != this_process()[0]:
        return False
    try:
        # The state follows the process name in parentheses, which may itself contain parentheses.
        state = (_SYSTEM / number / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"
