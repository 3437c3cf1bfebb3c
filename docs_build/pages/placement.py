"""Placements of parameter, gradient and optimizer state: their collectives, bytes, memory, names, and settings.

Each state is *replicated* on all ranks, sharded *within* a machine (each machine has a copy), or sharded over *all*
ranks. So there are 27 placements. Four rules give the collectives of a step:

1. A sharded parameter is all-gathered before forward, and, if it was resharded, again before backward.
2. In backward, a replicated gradient is all-reduced, and a sharded one is reduce-scattered. If it is sharded within a
   machine, the shards of all machines are also all-reduced.
3. Each rank updates the parameters whose optimizer state it stores. If it stores more parameters than that, it
   all-gathers the others after the optimizer step.
4. A placement is consistent if the gradient is sharded at least as finely as the parameter, and the optimizer state at
   least as finely as the gradient. Otherwise a rank stores something that it does not need, or needs something that it
   does not store.

Worked example, ZeRO-2: parameter replicated, the others sharded, P parameters on N ranks. Rule 2 gives a
reduce-scatter of P gradients, rule 3 an all-gather of P parameters: each rank sends 2 * 4 * P * (N - 1) / N bytes. It
stores ``4 * P`` bytes of parameters, ``4 * P / N`` of gradients and ``8 * P / N`` of Adam's state.

All numbers are float32 with Adam. ``docs/assets/js/placement.js`` computes the same numbers from the output of
`script`, and a test compares all of them.
"""

import itertools
import json
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from minifsdp_tools.formulas import ring_all_reduce_sends, ring_sends
from minifsdp_tools.links import Sent

DATA = "assets/placements.js"  # path of the output of `script`
LEVELS = ("replicated", "within", "all")
WORDS = {"replicated": "replicated", "within": "sharded within a machine", "all": "sharded over all ranks"}
GROUPS = {"all": "all ranks", "within": "the ranks of a machine", "between": "one rank of each machine"}
BYTES = {"parameter": 4, "gradient": 4, "optimizer": 8}

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# By the first letters of the three levels; with `*`, if parameters are not resharded after forward.
NAMES, SETTINGS, NOTES = TEXTS["names"], TEXTS["settings"], TEXTS["notes"]


@dataclass(frozen=True)
class Placement:
    """One of the levels for each state."""

    parameter: str
    gradient: str
    optimizer: str

    @property
    def key(self) -> str:
        """The first letters of the levels."""
        return self.parameter[0] + self.gradient[0] + self.optimizer[0]


@dataclass(frozen=True)
class Collective:
    """A collective of a step.

    Attributes:
        kind: ``AG``, ``RS`` or ``AR``.
        state: what it sends.
        group: a key of `GROUPS`.
        times: how often all parameters or gradients are sent.
        when: a part of the step.
    """

    kind: str
    state: str
    group: str
    times: int
    when: str


def all_placements() -> list[Placement]:
    """All 27 placements, the replicated ones first."""
    return [Placement(*levels) for levels in itertools.product(LEVELS, repeat=3)]


def consistent(placement: Placement) -> Placement:
    """The placement itself if it is consistent; otherwise the one with the same parameter and the fewest changes."""
    gradient = max(placement.parameter, placement.gradient, key=LEVELS.index)
    return replace(placement, gradient=gradient, optimizer=max(gradient, placement.optimizer, key=LEVELS.index))


def reasons(placement: Placement) -> list[str]:
    """The reasons why a placement is not consistent (rule 4); empty if it is."""
    levels = {state: LEVELS.index(level) for state, level in vars(placement).items()}
    pairs = {why: why.split("_over_") for why in TEXTS["why"]}
    return [TEXTS["why"][why] for why, (one, other) in pairs.items() if levels[one] > levels[other]]


def collectives(placement: Placement, *, reshards: bool) -> list[Collective]:
    """The collectives of a step of a consistent placement, by rules 1 to 3."""
    found = []
    if placement.parameter != "replicated":
        when = "before forward and before backward" if reshards else "before forward"
        found.append(Collective("AG", "parameters", placement.parameter, 2 if reshards else 1, when))
    if placement.gradient == "replicated":
        found.append(Collective("AR", "gradients", "all", 1, "in backward"))
    else:
        found.append(Collective("RS", "gradients", placement.gradient, 1, "in backward"))
    if placement.gradient == "within":
        found.append(Collective("AR", "gradients", "between", 1, "in backward"))
    if placement.parameter != placement.optimizer:
        group = "between" if placement.parameter == "within" else placement.optimizer
        found.append(Collective("AG", "updated parameters", group, 1, "after the optimizer step"))
    return found


def memory(placement: Placement, parameters: float, per_machine: int, machines: int) -> dict[str, float]:
    """Bytes of each state on a rank after backward."""
    shards = {"replicated": 1, "within": per_machine, "all": per_machine * machines}
    return {state: BYTES[state] * parameters / shards[level] for state, level in asdict(placement).items()}


def sent(collective: Collective, parameters: float, per_machine: int, machines: int) -> Sent:
    """Bytes that a rank sends, with the assumptions of ``links.py``."""
    ranks = {"all": per_machine * machines, "within": per_machine, "between": machines}[collective.group]
    # Between machines, each rank sends the shard that it has of its machine's copy.
    num_bytes = 4 * parameters * collective.times / (per_machine if collective.group == "between" else 1)
    total = (ring_all_reduce_sends if collective.kind == "AR" else ring_sends)(num_bytes, ranks)
    leaving = {"all": 1 / per_machine if machines > 1 else 0.0, "within": 0.0, "between": 1.0}[collective.group]
    return Sent(total * (1 - leaving), total * leaving)


def about(placement: Placement, *, reshards: bool) -> dict[str, Any]:
    """The contents of the page for a placement, except its numbers."""
    # There is only a difference if parameters are sharded.
    key = placement.key + ("" if reshards or placement.parameter == "replicated" else "*")
    why = reasons(placement)
    if why:
        return {"why": why, "instead": consistent(placement).key}
    return {
        "name": NAMES.get(key, ""),
        "setting": SETTINGS.get(key),
        "note": NOTES.get(key, ""),
        "collectives": [asdict(one) for one in collectives(placement, reshards=reshards)],
    }


def script() -> str:
    """The script with the data of all placements, by key, resharded and not."""
    found = {one.key: [about(one, reshards=reshards) for reshards in (True, False)] for one in all_placements()}
    data = {"levels": WORDS, "groups": GROUPS, "bytes": BYTES, "noSetting": TEXTS["no_setting"], "placements": found}
    return f"window.minifsdpPlacements = {json.dumps(data)};\n"
