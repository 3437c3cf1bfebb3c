"""The exercises, in the order of the pages in ``docs/exercises``.

Each exercise names the requirements whose tests must pass, and a lesson for each of them: what a solution does wrong if
the tests of this requirement fail.

Spec: LEARN-01.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from spec_tests.harness.accounting import ROOT

__all__ = ["EXERCISES", "Exercise", "statement_of"]


@dataclass(frozen=True)
class Exercise:
    """One function of the package to write.

    Attributes:
        number: from 1 to 10.
        title: a short title.
        place: the qualified name of the function.
        lessons: for each requirement, the mistake to look for if its tests fail.
        hints: three hints, each more precise than the one before.
    """

    number: int
    title: str
    place: str
    lessons: Mapping[str, str]
    hints: tuple[str, str, str]

    @property
    def file_name(self) -> str:
        """The name of the learner's file."""
        return f"exercise_{self.number:02}.py"

    @property
    def page(self) -> str:
        """The page of the exercise in ``docs``."""
        return f"exercises/{self.number:02}.md"


_ALL = (
    Exercise(
        1,
        "Flatten and shard",
        "FlatSharding.make_shard",
        {
            "SHARD-02": "Each rank must store shard_numel elements of the flat tensor: rank i stores shard_range(i).",
            "SHARD-03": "The elements after the last parameter are padding. They must exist, be zero, and come last.",
            "COST-02": "The shard must have its own memory. A view keeps the memory of the whole flat tensor alive.",
        },
        (
            "Begin with a flat tensor of padded_numel zeros, in the dtype and on the device of the values.",
            "flat.split(self.split_sizes) gives one view for each parameter. Copy each value, flattened, into "
            "its view.",
            "Return flat[self.shard_range(index)].clone(). With one shard, the flat tensor itself is the shard.",
        ),
    ),
    Exercise(
        2,
        "All-gather and reshard",
        "Unit.reshard",
        {
            "SHARD-04": "After forward and after backward, the unit must be SHARDED and its memory must be free.",
            "SHARD-13": "layout.free() frees the storage. Without it, the unsharded parameters stay in memory.",
            "LIM-02": "The rate limiter needs the event that layout.free() returns: call limiter.released(event).",
            "PREF-08": "A prefetched unit can still be GATHERING. Wait for its all-gather before you free its memory.",
        },
        (
            "Do nothing if the unit is already SHARDED. If it is GATHERING, call self.wait() first.",
            "Assign the sharded parameters to the modules with layout.use_sharded_params(), then set self.state.",
            "event = self.layout.free(); if event is not None: self.limiter.released(event). Record a FREE event "
            "before "
            "that if trace.recorder is not None. The smaller mesh begins before use_sharded_params().",
        ),
    ),
    Exercise(
        3,
        "The pre-backward hook",
        "register_pre_backward_hook",
        {
            "SHARD-04": "The hook must run before the backward of the module. Register it on the output of the module.",
            "FWD-06": "Each forward has its own output. Register the hook for each of them.",
            "CTOR-03": "An output can be a list, a dict or an object with tensors. Register the hook on each of them.",
        },
        (
            "tensors_in(output) finds the tensors in nested tuples, lists and dicts.",
            "Only tensors with requires_grad get a gradient. Call tensor.register_hook(notify) for these.",
            "Leave out the tensors in apart_from, compare with id(). If output is None, use the tensors in inputs. "
            "Return whether you have registered a hook. Then add the cases of the page: views, and objects.",
        ),
    ),
    Exercise(
        4,
        "Reduce-scatter and divide",
        "Scaling.of",
        {
            "SHARD-06": "before * after must be the divisor, so that the gradient is the mean over all ranks.",
            "SHARD-15": "All strategies must train like one process on the concatenated batch. Check the product.",
        },
        (
            "With float32 and bfloat16, sum first and divide afterwards: before is 1.",
            "float16 overflows at 65,504. Divide before the sum by a power of two, and by the rest after it.",
            "Double before while divisor % before == 0 and divisor / before > before. Return cls(before, divisor "
            "/ before).",
        ),
    ),
    Exercise(
        5,
        "Prefetching",
        "Schedule.next_backward",
        {
            "PREF-02": "With BACKWARD_PRE, the next unit must be known when the backward of this unit begins.",
            "PREF-08": "The next unit in backward is the unit that left forward before this one, in this iteration.",
            "FWD-06": "A unit that ran twice has two positions. Its last use comes first in backward.",
        },
        (
            "self._left lists the units in the order in which they left forward. Backward goes through it in reverse.",
            "self._left_at[unit] lists the positions of a unit in self._left. Remove and use the last one.",
            "While the unit before this position is the same unit, go one position back: it is already "
            "unsharded. Return "
            "None at the beginning, and for a unit without positions.",
        ),
    ),
    Exercise(
        6,
        "The rate limiter",
        "RateLimiter.throttle",
        {
            "LIM-02": (
                "With num_in_flight events in the queue, wait for the oldest one, remove it, and wait for no other."
            ),
            "LIM-03": "Without the limiter the queue is always empty, and the CPU must not wait.",
            "LIM-06": "If the event is not complete, the CPU must wait for it: call synchronize().",
        },
        (
            "self._events is a queue. The oldest event is at its left end.",
            "Return at once if fewer than num_in_flight events are in the queue. Otherwise remove the oldest one.",
            "If oldest.query() is true, return. Otherwise record a WAIT event if trace.recorder is not None, and call "
            "oldest.synchronize().",
        ),
    ),
    Exercise(
        7,
        "no_sync",
        "FlatGradients.keep_unreduced",
        {
            "NOSYNC-01": "Gradients of several backwards must add up. Do not replace the earlier one.",
            "NOSYNC-02": (
                "The next reduction must find the sum. take_unreduced() needs self._reduced and self._version."
            ),
            "NOSYNC-05": "Inside no_sync, .grad has the size of the unsharded parameters.",
        },
        (
            "self.take_unreduced() removes and returns the gradient of earlier backwards, or returns None.",
            "Add it to the new gradient. Keep the reduced gradients of all parameters in self._reduced before "
            "you assign.",
            "parts = self._registered.unsharded_parts(gradient) has one part for each parameter. Use "
            "assign_gradients, with "
            "None for parameters that do not require a gradient. Set self._unreduced only if there are several parts.",
        ),
    ),
    Exercise(
        8,
        "An uneven last shard",
        "shard_range",
        {
            "FS2-05": (
                "Rows are split like torch.chunk: each rank has ceil(size / num_shards) rows until none are left."
            ),
            "FS2-06": "The last ranks have fewer rows or none. Neither end of the range may exceed size.",
        },
        (
            "torch.chunk gives ceil(size / num_shards) rows to each rank until no rows are left.",
            "-(-size // num_shards) is the quotient, rounded up.",
            "Rank index begins at index times this number. Limit both ends of the range to size.",
        ),
    ),
    Exercise(
        9,
        "The state dict of a unit",
        "UnitCodec.in_form",
        {
            "SD-FULL-01": "A full state dict contains plain tensors of the original shapes.",
            "SD-FULL-07": "Later training must not change the result. Return a copy, not the gathered memory.",
            "SD-SHARD-01": "A sharded state dict contains this rank's rows as a ShardedTensor, or as a DTensor.",
            "SD-SHARD-02": "The rows of all ranks together must be the full value. Split along dim 0 by shard_of.",
        },
        (
            "A full form, a unit that is not sharded, and a value without rows give a copy of the full value.",
            "form.offload asks for the CPU. shard_of(full, 0, self.group.size, self.group.rank) gives this "
            "rank's rows.",
            "With a mesh of the wrapper or form.use_dtensor, return tensors.as_dtensor(full, self.group, "
            "self._device_mesh, "
            "device). Otherwise return tensors.as_sharded_tensor(rows, full.shape, self.group).",
        ),
    ),
    Exercise(
        10,
        "A DTensor from a shard",
        "_around",
        {
            "FS2-04": "shape must be that of the whole parameter, and the placements those of the spec.",
            "FS2-07": "full_tensor() must give the whole value on all ranks, without padding.",
            "FS2-MP-02": "The dtype of the DTensor must be that of the local tensor, also if the spec has another one.",
        },
        (
            "A DTensorSpec has a mesh, placements, and tensor_meta with shape, stride and dtype.",
            "DTensor(local, spec, requires_grad=False) wraps a local tensor without communication.",
            "If tensor_meta.dtype is not local.dtype, create a spec with tensor_meta._replace(dtype=local.dtype).",
        ),
    ),
)

EXERCISES = {exercise.number: exercise for exercise in _ALL}


def statement_of(row: str) -> str:
    """The text of a requirement in ``docs/spec.md``."""
    text = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(row)} \| (.*?) \| ", text, re.MULTILINE)
    assert found is not None, row
    return found.group(1)
