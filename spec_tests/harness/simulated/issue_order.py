"""The order of operations on NCCL, which also runs the collectives of one communicator in the order of their issue.

A communicator (a process group on one device) never runs two collectives at once, on whatever streams they are. torch
documents no such order, so a program must not rely on it instead of a wait. The simulation uses two orders:

=================  =================================================================================================
the streams' order  for the race checker and the replay: what streams and events guarantee, and nothing else
`IssueOrder`        for overlaps, pictures and timelines: also the collectives of each communicator, one by one
=================  =================================================================================================

A reduce-scatter is issued after an all-gather of the same group. Their streams never wait for each other::

    gather stream    AG1            the streams allow RS2 to run at the same time as AG1
    reduce stream        RS2        NCCL runs it after AG1, and so after all that AG1 waits for

A read of AG1's output on the reduce stream after RS2 is a race: only the communicator orders it.

Spec: SIM-12.
"""

from __future__ import annotations

from collections.abc import Sequence

from spec_tests.harness.simulated.clocks import Clock, join
from spec_tests.harness.simulated.replay import Operation

__all__ = ["IssueOrder"]


class IssueOrder:
    """Which operations of a log are complete when another one begins on NCCL.

    Args:
        operations: all operations of a log, in the order of their launch.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._clocks: dict[tuple[int, int], Clock] = {}
        last: dict[int, Operation] = {}
        for operation in operations:
            before = [item for item in operation.clock.items() if item[0] != operation.stream]
            before.append((operation.stream, operation.number - 1))
            if operation.communicator and (issued := last.get(operation.communicator)):
                before.append((issued.stream, issued.number))
            if operation.communicator:
                last[operation.communicator] = operation
            clock = dict(operation.clock)
            for item in before:
                join(clock, {item[0]: item[1]})
                join(clock, self._clocks.get(item, {}))
            self._clocks[operation.stream, operation.number] = clock

    def is_before(self, one: Operation, other: Operation) -> bool:
        """Whether ``one`` is complete when ``other`` begins."""
        if one.stream == other.stream:
            return one.number < other.number
        return self._clocks[other.stream, other.number].get(one.stream, 0) >= one.number

    def may_overlap(self, one: Operation, other: Operation) -> bool:
        """Whether the two can run at the same time."""
        return not (self.is_before(one, other) or self.is_before(other, one))
