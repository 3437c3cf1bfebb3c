"""Short programs, one for each kind of wrong number that the drawn programs must be able to find."""

from __future__ import annotations

from typing import Any

from spec_tests.random_programs.description import Call, Description
from spec_tests.random_programs.draw import of_blocks

__all__ = ["KNOWN"]

FORWARD: Call = {"do": "forward", "batch": 0}
BACKWARD: Call = {"do": "backward", "which": "all"}
EVALUATE: Call = {"do": "evaluate", "batch": 1}
STEP: Call = {"do": "step"}
TRAIN = [FORWARD, BACKWARD, STEP]
NEW: Call = {"do": "new_optimizer"}
GENERATE: Call = {"do": "generate", "batch": 1}
DROP: Call = {"do": "zero_grad", "to_none": True, "of_model": True}
IN_EVALUATION: Call = {"do": "mode", "train": False}
NO_SYNC: Call = {"do": "enter", "what": "no_sync"}
LEAVE: Call = {"do": "leave"}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def _edit(how: str | None, *, of_model: bool) -> Call:
    return {"do": "edit", "how": how, "of_model": of_model}


def _convert(how: str) -> Call:
    return {"do": "convert", "dtype": "double", "how": how}


def _wrapped(*calls: Call, **options: Any) -> Description:
    return of_blocks(calls=calls, **options)


def _composed(*calls: Call, **options: Any) -> Description:
    # Not a strategy of this API: the root stays unsharded after forward, which is the default.
    return of_blocks(calls=calls, **{"api": "fully_shard", "strategy": "NO_SHARD", **options})


SHARED = {"kinds": ("mlp", "add", "view")}
FULL_IN_EVAL = {"precision": "single", "full_in_eval": True}
BY_ADAM = {"adam": True}

KNOWN: dict[str, list[Description]] = {
    "a gradient that shares memory with the input's": [
        *(_wrapped(FORWARD, BACKWARD, strategy="NO_SHARD", originals=each, **SHARED) for each in (False, True)),
        *(_wrapped(FORWARD, BACKWARD, strategy=each, hook="in_place", **SHARED) for each in STRATEGIES),
        _composed(FORWARD, BACKWARD, **SHARED),
    ],
    "an accumulated gradient that shares memory with the input's": [
        *(
            _wrapped(NO_SYNC, FORWARD, BACKWARD, FORWARD, BACKWARD, LEAVE, FORWARD, BACKWARD, strategy=each, **SHARED)
            for each in STRATEGIES
        ),
    ],
    "an optimizer that is created after an evaluation": [
        *(_composed(each, NEW, *TRAIN) for each in (EVALUATE, GENERATE)),
        *(_wrapped(EVALUATE, NEW, *TRAIN, originals=each) for each in (False, True)),
    ],
    "parameters that are edited after an evaluation": [
        *(
            make(FORWARD, BACKWARD, EVALUATE, _edit(how, of_model=True), EVALUATE)
            for make in (_composed, _wrapped)
            for how in (None, "data", "foreach")
        ),
    ],
    "gradients that are dropped before their reduction": [
        _composed({"do": "sync", "value": False}, FORWARD, BACKWARD, DROP, {"do": "sync", "value": True}, *TRAIN),
        _wrapped(NO_SYNC, FORWARD, BACKWARD, DROP, LEAVE, *TRAIN),
    ],
    "a unit of several dtypes": [
        *(
            _composed(*TRAIN, kinds=("mlp", kind, "mlp"), strategy=each)
            for kind in ("both", "dtypes")
            for each in ("FULL_SHARD", "SHARD_GRAD_OP")
        ),
    ],
    "a model of another dtype after a forward": [
        *(_composed(FORWARD, _convert(how), FORWARD, BACKWARD, dtype="float") for how in ("method", "assign")),
        *(_composed(*TRAIN, _convert(how), FORWARD, BACKWARD, dtype="float") for how in ("method", "assign")),
    ],
    "a step that no version counter shows": [
        *(
            make(*before, STEP, EVALUATE, steps_by=how, **BY_ADAM)
            for make in (_composed, _wrapped)
            for how in ("foreach", "fused")
            for before in ([FORWARD, BACKWARD, EVALUATE], [FORWARD, BACKWARD, FORWARD])
        ),
        _composed(
            {"do": "keep_after_backward", "value": True},
            FORWARD,
            BACKWARD,
            STEP,
            EVALUATE,
            steps_by="foreach",
            **BY_ADAM,
        ),
        *(_composed(EVALUATE, _edit(how, of_model=False), EVALUATE) for how in ("data", "foreach")),
    ],
    "parameters of NO_SHARD that are edited through their data": [
        *(
            _wrapped(
                FORWARD,
                _edit("data", of_model=False),
                EVALUATE,
                strategy="NO_SHARD",
                precision="single",
                originals=each,
            )
            for each in (False, True)
        ),
    ],
    "an evaluation in full precision": [
        *(
            _wrapped(*calls, IN_EVALUATION, EVALUATE, strategy=each, forward_prefetch=True, **FULL_IN_EVAL)
            for each in STRATEGIES
            for calls in ([], [NO_SYNC, FORWARD, BACKWARD, LEAVE], [FORWARD], [*TRAIN, *TRAIN], [FORWARD, BACKWARD])
        ),
        *(_wrapped({**IN_EVALUATION, "inner": True}, EVALUATE, strategy=each, **FULL_IN_EVAL) for each in STRATEGIES),
        *(_wrapped(IN_EVALUATION, FORWARD, BACKWARD, strategy=each, **FULL_IN_EVAL) for each in STRATEGIES),
    ],
}
