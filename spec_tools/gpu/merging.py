"""Merges the results of all ranks in ``nodes`` into one outcome, and names the rank that has failed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spec_tools.gpu.chunks import Outcome
from spec_tools.gpu.names import local_names
from spec_tools.gpu.node_stages import Place

__all__ = ["merge", "names_of"]

Result = Mapping[str, Any]
# The worst first. A rank that has stopped waited for another one.
WORDS = ("crashed", "failed", "hung", "stopped", "passed")
# Errors of a rank whose connection to another rank was closed.
CLOSED = re.compile("Connection (closed|reset) by peer|Broken pipe|communicator was aborted|remote process exited")


def merge(stage: str, found: Mapping[int, Result], place: Place, limit: float) -> Outcome:
    """The outcome of a stage on all ranks.

    Args:
        stage: the name of the stage.
        found: the results by rank, see ``nodes._result``; without the ranks that have not answered.
        place: that of any rank, for the number of ranks.
        limit: of the stage, in seconds.
    """
    lost = [rank for rank in range(place.num_ranks) if rank not in found]
    found = _without_consequences(found)
    word = min((result["word"] for result in found.values()), key=WORDS.index, default="hung")
    seconds = max((result["seconds"] for result in found.values()), default=limit)
    findings = _findings(stage, found)
    if lost:
        names = ", ".join(_name(rank, place) for rank in lost)
        reason = f"no answer from {names}: the program or the machine has died"
        return Outcome("crashed", seconds, reason, _logs(found, place), findings)
    if word == "passed":
        return _same_versions(Outcome("passed", seconds, findings=findings), found, place)
    return Outcome(
        "hung" if word == "stopped" else word, seconds, _reason(word, found, place), _logs(found, place), findings
    )


def _without_consequences(found: Mapping[int, Result]) -> dict[int, Result]:
    """The results; a rank that failed because another one closed the connection has the word of a rank that waits."""
    causes = {result["word"] for result in found.values() if not _was_closed(result)}
    word = "hung" if "hung" in causes else "stopped" if causes & {"crashed", "failed"} else "failed"
    return {rank: {**result, "word": word} if _was_closed(result) else result for rank, result in found.items()}


def _was_closed(result: Result) -> bool:
    return result["word"] == "failed" and CLOSED.search(result["reason"]) is not None


def _name(rank: int, place: Place) -> str:
    return replace(place, rank=rank, node=rank // place.local_size, local_rank=rank % place.local_size).name


def _reason(word: str, found: Mapping[int, Result], place: Place) -> str:
    """The ranks with the worst word; of ranks that hang, those that have passed the fewest marks."""
    ranks = [rank for rank, result in found.items() if result["word"] == word]
    if word in ("hung", "stopped"):
        fewest = min(len(found[rank]["marks"]) for rank in ranks)
        behind = [rank for rank in ranks if len(found[rank]["marks"]) == fewest]
        if len(behind) < len(ranks):
            others = _position(found[next(rank for rank in ranks if rank not in behind)])
            names = ", ".join(_name(rank, place) for rank in behind)
            return f"{names} did not end{_position(found[behind[0]])}; the other ranks wait{others}"
    first = found[ranks[0]]
    more = f" (and {len(ranks) - 1} more ranks)" if len(ranks) > 1 else ""
    return f"{_name(ranks[0], place)}{more}: {first['reason']}{_position(first)}"


def _position(result: Result) -> str:
    return f", in {result['marks'][-1]}" if result["marks"] else ", before its first step"


def _logs(found: Mapping[int, Result], place: Place) -> str:
    """The last lines of all ranks that did not pass, the worst first."""
    ranks = sorted(found, key=lambda rank: (WORDS.index(found[rank]["word"]), len(found[rank]["marks"])))
    failed = [rank for rank in ranks if found[rank]["word"] != "passed"]
    return "\n".join(
        f"--- {_name(rank, place)}: {found[rank]['reason']} ---\n{found[rank]['last_lines']}" for rank in failed
    )


def _findings(stage: str, found: Mapping[int, Result]) -> list[dict[str, Any]]:
    """Those of rank 0; for ``hardware`` one finding about all ranks."""
    if stage != "hardware":
        return list(found[0]["findings"]) if 0 in found else []
    ranks = [line for _, result in sorted(found.items()) for line in result["findings"]]
    if not ranks:
        return []
    devices = [{"name": line["device"], "node": line["node"], "rank": line["rank"]} for line in ranks]
    shown = [{name: line[name] for name in ("rank", "node", "local rank", "device")} for line in ranks]
    system = f"{len({line['node'] for line in ranks})} nodes, {os.uname().sysname} {os.uname().release}"
    about = {"devices": devices, "ranks": shown, "processors": os.cpu_count(), "system": system}
    return [{"outcome": "passed", "versions": ranks[0]["versions"], **about}]


def _same_versions(outcome: Outcome, found: Mapping[int, Result], place: Place) -> Outcome:
    """The outcome, which has failed if the ranks have different versions."""
    versions = {
        rank: line["versions"] for rank, result in found.items() for line in result["findings"] if "versions" in line
    }
    for rank, of_rank in versions.items():
        for name, version in of_rank.items():
            if version != versions[0].get(name):
                reason = f"{_name(rank, place)} has {name} {version}, and rank 0 has {versions[0].get(name)}"
                return replace(outcome, word="failed", reason=reason)
    return outcome


def names_of(hosts: Mapping[int, str]) -> dict[str, str]:
    """The names of this machine and of all hosts, each with its replacement in the report."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts[rank] for rank in sorted(hosts)))}
    of_hosts = {name: f"host{number}" for host, number in numbers.items() for name in (host.partition(".")[0], host)}
    return local_names() | {name: word for name, word in of_hosts.items() if len(name) > 2 and name != "localhost"}
