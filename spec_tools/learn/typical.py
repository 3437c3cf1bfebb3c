"""Typical wrong solutions of the exercises, four for each, as edits of the package's own function.

::

    python -m spec_tools.learn.typical            checks all of them and the package's solutions
    python -m spec_tools.learn.typical 6 8        only these exercises

The command writes the record ``docs/data/exercises.json``: the requirements that reject each wrong solution.

Spec: LEARN-04.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Sequence

from spec_tests.harness.accounting import ROOT
from spec_tests.harness.edit import Edit, definitions, find, never, remove, replace
from spec_tools.learn.exercises import EXERCISES, Exercise
from spec_tools.learn.grade import grade
from spec_tools.mutants.mutant import PACKAGE

__all__ = ["RECORD", "WRONG", "solution_of", "wrong_solution"]

RECORD = ROOT / "docs" / "data" / "exercises.json"

# For each exercise, what is wrong, and the edit that makes the package's function wrong in this way.
WRONG: dict[int, dict[str, Edit]] = {
    1: {
        "The shard is a view of the flat tensor": replace(
            "FlatSharding.make_shard", "flat[self.shard_range(index)].clone()", "flat[self.shard_range(index)]"
        ),
        "Every rank stores the first shard": replace(
            "FlatSharding.make_shard", "self.shard_range(index)", "self.shard_range(0)"
        ),
        "The flat tensor has no padding": replace(
            "FlatSharding.make_shard", "values[0].new_zeros(self.padded_numel)", "values[0].new_zeros(self.numel)"
        ),
        "The values are not copied": remove("FlatSharding.make_shard", "target.copy_(value.reshape(-1))"),
    },
    2: {
        "The memory is not freed": replace("Unit.reshard", "self.layout.free()", "None"),
        "The modules keep the unsharded parameters": remove("Unit.reshard", "self.layout.use_sharded_params()"),
        "The limiter gets no event": remove("Unit.reshard", "self.limiter.released(event)"),
        "The state stays UNSHARDED": replace("Unit.reshard", "(State.SHARDED, False)", "(self.state, False)"),
    },
    3: {
        "Only a single tensor gets a hook": replace(
            "register_pre_backward_hook", "list(tensors_in($x))", "[]", times=2
        ),
        "No tensor gets a hook": remove("register_pre_backward_hook", "tensor.register_hook(notify)"),
        "The result says that no hook is registered": replace(
            "register_pre_backward_hook", "is_registered = True", "is_registered = False"
        ),
        "A tensor without grad gets a hook": replace("register_pre_backward_hook", "tensor.requires_grad", "True"),
    },
    4: {
        "The gradient is the sum": replace("Scaling.of", "cls(1.0, float(divisor))", "cls(1.0, 1.0)"),
        "The sum is divided twice": replace(
            "Scaling.of", "cls(1.0, float(divisor))", "cls(float(divisor), float(divisor))"
        ),
        "float16 is divided by the power of two alone": replace("Scaling.of", "divisor / before", "1.0", times=2),
        "float16 is not divided before the sum": replace(
            "Scaling.of", "cls(before, divisor / before)", "cls(1.0, float(divisor))"
        ),
    },
    5: {
        "The first use comes first": replace("Schedule.next_backward", "positions.pop()", "positions.pop(0)"),
        "The next unit is the one after it": replace(
            "Schedule.next_backward",
            "self._left[position - 1] if position else None",
            "self._left[position + 1] if position + 1 < len(self._left) else None",
        ),
        "No unit is prefetched": replace(
            "Schedule.next_backward", "self._left[position - 1] if position else None", "None"
        ),
        "A unit that ran twice in a row is prefetched": never("Schedule.next_backward", "position and $x is unit"),
    },
    6: {
        "The newest event is removed": replace("RateLimiter.throttle", "self._events.popleft()", "self._events.pop()"),
        "The CPU never waits": remove("RateLimiter.throttle", "oldest.synchronize()"),
        "Three units are in flight": replace(
            "RateLimiter.throttle", "len(self._events) < self.num_in_flight", "len(self._events) <= self.num_in_flight"
        ),
        "The oldest event stays in the queue": replace(
            "RateLimiter.throttle", "self._events.popleft()", "self._events[0]"
        ),
    },
    7: {
        "The earlier gradient is lost": replace("FlatGradients.keep_unreduced", "self.take_unreduced()", "None"),
        "The reduced gradient is lost": replace(
            "FlatGradients.keep_unreduced", "[parameter.grad for parameter in self._parameters]", "None"
        ),
        "No parameter gets a gradient": replace("FlatGradients.keep_unreduced", "part if $x else None", "None"),
        "The sum is counted twice": replace(
            "FlatGradients.keep_unreduced", "before.add_(gradient)", "before.add_(before)"
        ),
    },
    8: {
        "The quotient is rounded down": replace("shard_range", "-(-size // num_shards)", "size // num_shards"),
        "The last shard is too long": replace("shard_range", "min((index + 1) * most, size)", "(index + 1) * most"),
        "The first rows are missing": replace(
            "shard_range", "min(index * most, size)", "min((index + 1) * most, size)"
        ),
        "An empty shard begins after the end": replace("shard_range", "min(index * most, size)", "index * most"),
    },
    9: {
        "The result is the gathered memory": replace(
            "UnitCodec.in_form", "full.to(device, copy=True)", "full.to(device)"
        ),
        "A sharded form is unsharded": replace("UnitCodec.in_form", "not form.is_sharded", "form.is_sharded"),
        "Every rank has the first rows": replace("UnitCodec.in_form", "self.group.rank", "0"),
        "The result is always a DTensor": replace(
            "UnitCodec.in_form", "self._wrapper.device_mesh is not None or form.use_dtensor", "True"
        ),
    },
    10: {
        "The dtype is that of the spec": never("_around", "meta.dtype is not local.dtype"),
        "The DTensor is replicated": replace(
            "_around",
            "DTensor(local, spec, requires_grad=False)",
            "DTensor.from_local(local, spec.mesh, run_check=False)",
        ),
        "The shape is that of the shard": replace(
            "_around",
            "DTensor(local, spec, requires_grad=False)",
            "DTensor.from_local(local, spec.mesh, spec.placements, run_check=False)",
        ),
        "The values are not those of the shard": replace(
            "_around",
            "DTensor(local, spec, requires_grad=False)",
            "DTensor(torch.zeros_like(local), spec, requires_grad=False)",
        ),
    },
}


def solution_of(exercise: Exercise) -> str:
    """The package's solution as a learner's file."""
    path, _ = definitions(PACKAGE)[exercise.place][0]
    return _function_in(path.read_text(encoding="utf-8"), exercise)


def wrong_solution(exercise: Exercise, mistake: str) -> str:
    """A wrong solution as a learner's file."""
    return _function_in(WRONG[exercise.number][mistake].apply(PACKAGE).text, exercise)


def _function_in(text: str, exercise: Exercise) -> str:
    node = find(ast.parse(text), exercise.place)[0]
    node.decorator_list = []
    return f"from __future__ import annotations\n\n{ast.unparse(node)}\n"


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if the package's solutions pass, and each wrong solution fails."""
    chosen = [EXERCISES[int(number)] for number in arguments] or [*EXERCISES.values()]
    return max(_check(exercise) for exercise in chosen)


def _check(exercise: Exercise) -> int:
    """Checks the solutions of one exercise. Writes them to the record if each has the expected result."""
    solved = grade(exercise, solution_of(exercise))
    print(f"{exercise.number:2} the package's solution: {solved.text}", flush=True)
    failed = {}
    for mistake in WRONG[exercise.number]:
        result = grade(exercise, wrong_solution(exercise, mistake))
        failed[mistake] = [*result.failed]
        print(f"{exercise.number:2} {mistake}: {' '.join(result.failed) or 'NOT REJECTED ' + result.text}", flush=True)
    if not solved.is_solved or not all(failed.values()):
        return 1
    found = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found[str(exercise.number)] = failed
    found = {number: found[number] for number in sorted(found, key=int)}
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
