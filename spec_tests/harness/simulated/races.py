"""The kinds of collisions, and their reports.

There are four kinds:

* ``race``: two accesses to the same bytes of one allocation, at least one of them a write, and no order between them;
* ``reuse``: the bytes were returned to their stream and reallocated while another stream still used them;
* ``freed``: the bytes were used after ``resize_(0)``;
* ``garbage``: the bytes are the output of a collective that cannot complete (see ``stuck.py``).

A report names both operators, both streams and the lines of the program. It also names the missing wait: which stream
must wait for which, and up to which operation it has waited so far.

Spec: SIM-03.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_tests.harness.simulated.clocks import HOST
from spec_tests.harness.simulated.memory import Access, Block

if TYPE_CHECKING:
    from spec_tests.harness.simulated.world import World

__all__ = ["Race", "SimulatedRaceError"]


class SimulatedRaceError(RuntimeError):
    """A collision on a strict device, which raises immediately."""


@dataclass(frozen=True)
class Race:
    """One collision.

    Attributes:
        kind: ``race``, ``reuse``, ``freed`` or ``garbage``.
        text: the report.
        new, old: the two accesses.
    """

    kind: str
    text: str
    new: Access
    old: Access | None

    @classmethod
    def of(cls, world: World, kind: str, new: Access, old: Access | None, block: Block | None) -> Race:
        """Creates the report at the time of the collision, while the waits so far are known."""
        if old is None:
            return cls(kind, f"FREED: {_reported(world, new)} uses memory that was given back", new, None)
        if kind == "garbage":
            text = f"GARBAGE: {_reported(world, new)}\n  has the output of {old.operator} [{old.where}]"
            return cls(kind, f"{text}, which cannot complete because a rank never arrives", new, old)
        lines = [f"{kind.upper()}: {_reported(world, new)}", f"  is not ordered after {_reported(world, old)}"]
        if kind == "reuse" and block is not None:
            owner = world.name_of(block.owner)
            lines.append(
                f"  the bytes were freed and handed out again to the {owner} (at {block.where}), which may use them at "
                f"once: record_stream, or keep the tensor until the {owner} has waited"
            )
        lines.append(f"  missing: {_missing(world, new, old)}")
        return cls(kind, "\n".join(lines), new, old)

    def __str__(self) -> str:
        return self.text


def _reported(world: World, access: Access) -> str:
    verb = "write" if access.is_write else "read"
    return (
        f"{verb} of bytes {access.low} to {access.high} on the {world.name_of(access.stream)} by "
        f"{access.operator} [{access.where}]"
    ).replace("the the", "the")


def _missing(world: World, new: Access, old: Access) -> str:
    waits, for_ = world.name_of(new.stream), world.name_of(old.stream)
    if new.stream == HOST:
        return f"the CPU never waited for the {for_} up to there: synchronize an event recorded after it"
    learned = world.streams[new.stream].learned.get(old.stream)
    if learned is None:
        return f"the {waits} has never waited for the {for_}"
    number, where = learned
    return (
        f"the {waits} has waited for the {for_} up to its operation {number} (at {where}); this one has number "
        f"{old.number}"
    )
