"""Short programs, one for each kind of wrong number that the drawn programs must be able to find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spec_tests.random_programs.description import Call, Description
from spec_tests.random_programs.draw import of_blocks

# By short name.
CALLS: dict[str, Call] = {
    "forward": {"do": "forward", "batch": 0},
    "backward": {"do": "backward", "which": "all"},
    "evaluate": {"do": "evaluate", "batch": 1},
    "generate": {"do": "generate", "batch": 1},
    "step": {"do": "step"},
    "new": {"do": "new_optimizer"},
    "drop": {"do": "zero_grad", "to_none": True, "of_model": True},
    "eval": {"do": "mode", "train": False},
    "inner_eval": {"do": "mode", "train": False, "inner": True},
    "no_sync": {"do": "enter", "what": "no_sync"},
    "leave": {"do": "leave"},
    "sync_off": {"do": "sync", "value": False},
    "sync_on": {"do": "sync", "value": True},
    "keep": {"do": "keep_after_backward", "value": True},
    "edit": {"do": "edit", "how": None, "of_model": True},
    **{f"edit_{how}": {"do": "edit", "how": how, "of_model": True} for how in ("data", "foreach")},
    **{f"edit_owned_{how}": {"do": "edit", "how": how, "of_model": False} for how in ("data", "foreach")},
    **{f"convert_{how}": {"do": "convert", "dtype": "double", "how": how} for how in ("method", "assign")},
}
TRAIN = "forward backward step"
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def wrapped(*programs: str, **options: Any) -> Iterator[Description]:
    """Programs of calls, by their short names. An option that is a list has one program for each value."""
    several = next((name for name, value in options.items() if isinstance(value, list)), None)
    for value in options[several] if several else [None]:
        chosen = {**options, several: value} if several else options
        for names in programs:
            yield of_blocks(calls=tuple(CALLS[name] for name in names.split()), **chosen)


def composed(*programs: str, **options: Any) -> Iterator[Description]:
    # Not a strategy of this API: the root stays unsharded after forward, which is the default.
    return wrapped(*programs, **{"api": "fully_shard", "strategy": "NO_SHARD", **options})


SHARED = ("mlp", "add", "view")
FULL_IN_EVAL: dict[str, Any] = {"precision": "single", "full_in_eval": True, "strategy": [*STRATEGIES]}
BOTH: dict[str, Any] = {"steps_by": ["foreach", "fused"], "adam": True}
AFTER_EVALUATION = [f"forward backward evaluate {edit} evaluate" for edit in ("edit", "edit_data", "edit_foreach")]

KNOWN: dict[str, list[Description]] = {
    "a gradient that shares memory with the input's": [
        *wrapped("forward backward", strategy="NO_SHARD", originals=[False, True], kinds=SHARED),
        *wrapped("forward backward", strategy=[*STRATEGIES], hook="in_place", kinds=SHARED),
        *composed("forward backward", kinds=SHARED),
    ],
    "an accumulated gradient that shares memory with the input's": [
        *wrapped(
            "no_sync forward backward forward backward leave forward backward", strategy=[*STRATEGIES], kinds=SHARED
        ),
    ],
    "an optimizer that is created after an evaluation": [
        *composed(f"evaluate new {TRAIN}", f"generate new {TRAIN}"),
        *wrapped(f"evaluate new {TRAIN}", originals=[False, True]),
    ],
    "parameters that are edited after an evaluation": [*composed(*AFTER_EVALUATION), *wrapped(*AFTER_EVALUATION)],
    "gradients that are dropped before their reduction": [
        *composed(f"sync_off forward backward drop sync_on {TRAIN}"),
        *wrapped(f"no_sync forward backward drop leave {TRAIN}"),
    ],
    "a unit of several dtypes": [
        *composed(TRAIN, kinds=("mlp", "both", "mlp"), strategy=["FULL_SHARD", "SHARD_GRAD_OP"]),
        *composed(TRAIN, kinds=("mlp", "dtypes", "mlp"), strategy=["FULL_SHARD", "SHARD_GRAD_OP"]),
    ],
    "a model of another dtype after a forward": [
        *composed("forward convert_method forward backward", "forward convert_assign forward backward", dtype="float"),
        *composed(
            f"{TRAIN} convert_method forward backward", f"{TRAIN} convert_assign forward backward", dtype="float"
        ),
    ],
    "a step that no version counter shows": [
        *composed("forward backward evaluate step evaluate", "forward backward forward step evaluate", **BOTH),
        *wrapped("forward backward evaluate step evaluate", "forward backward forward step evaluate", **BOTH),
        *composed(f"keep {TRAIN} evaluate", steps_by="foreach", adam=True),
        *composed("evaluate edit_owned_data evaluate", "evaluate edit_owned_foreach evaluate"),
    ],
    "parameters of NO_SHARD that are edited through their data": [
        *wrapped("forward edit_owned_data evaluate", strategy="NO_SHARD", precision="single", originals=[False, True]),
    ],
    "an evaluation in full precision": [
        *wrapped(
            "eval evaluate",
            "no_sync forward backward leave eval evaluate",
            "forward eval evaluate",
            f"{TRAIN} {TRAIN} eval evaluate",
            "forward backward eval evaluate",
            forward_prefetch=True,
            **FULL_IN_EVAL,
        ),
        *wrapped("inner_eval evaluate", "eval forward backward", **FULL_IN_EVAL),
    ],
}
