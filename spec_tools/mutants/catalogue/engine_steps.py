"""Mutants of the runtime of a step: when parameters are all-gathered, resharded and reduced."""

from __future__ import annotations

from spec_tests.harness.edit import always, never, remove, replace
from spec_tools.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    # --- engine/backward_hooks.py ---
    Mutant(
        "inputs-are-not-watched",
        "FS2-17",
        "A unit is resharded and reduced only at the end of backward.",
        always("InputsHooks.watch_inputs", "not $watched"),
    ),
    Mutant(
        "sums-that-backward-passes-by-are-left",
        "FS2-SYNC-01",
        "The reducing backward does not reduce the accumulated gradient of a unit that it does not reach.",
        replace("InputsHooks.is_overdue", "$unit.policy.reduces and $unit.layout.has_unreduced", "False"),
    ),
    Mutant(
        "view-changed-by-the-caller-has-no-hook",
        "FWD-06 FS2-13",
        "If the caller changes a view in place that a unit returned, the unit is not all-gathered for backward.",
        remove("register_pre_backward_hook", "$tensor._base.register_hook($notify)"),
    ),
    # --- engine/hooks.py ---
    Mutant(
        "kept-after-backward",
        "SHARD-04",
        "Units are resharded only at the end of the whole backward.",
        never("IterationState.post_backward", "$unit.policy.reshard_after_backward and (not $unit.is_held)"),
    ),
    Mutant(
        "prefetched-too-late",
        "PREF-02 PREF-03",
        "BACKWARD_PRE prefetches nothing.",
        never("IterationState.pre_backward", "self.schedule.backward_prefetch is BackwardPrefetch.BACKWARD_PRE"),
    ),
    Mutant(
        "recovery-keeps-reductions",
        "NEW-15",
        "After an error in backward the reduced gradients remain for the next backward.",
        remove("IterationState.recover", "self.reducer.drop()"),
    ),
    Mutant(
        "the-next-gather-begins-before-this-one-is-copied-out",
        "STREAM-17",
        "Two all-gather buffers are in memory at the same time.",
        replace("IterationState.pre_backward", "$unit.wait()", "self._prefetch_backward($unit)\n$unit.wait()"),
        "simulated",
    ),
    Mutant(
        "a-backward-ends-a-manual-iteration",
        "NEW-25",
        "A backward ends the iteration, although the program finalizes it.",
        replace("Manual.backward_ends", "self.iteration.keep_open()", "self.iteration.end_iteration()"),
    ),
    Mutant(
        "end-of-backward-in-forward-reshards",
        "PROG-23",
        "A backward inside a forward reshards units that compute.",
        replace("InnerBackward._is_inside_forward", "self._iteration.in_forward", "False"),
    ),
    Mutant(
        "changed-parameters-are-used",
        "PROG-26",
        "A backward uses parameters that have changed since the forward.",
        never("ChangedParameters._check", "$unit in self._changed"),
    ),
    Mutant(
        "views-of-parameters-are-freed",
        "PROG-32",
        "A unit that returns a view of a parameter is resharded, and the caller reads freed memory.",
        replace(
            "_shares_memory",
            "type($t) in $plain and $t.untyped_storage().data_ptr() in $memory",
            "type($t) is torch.nn.Parameter and $t.untyped_storage().data_ptr() in $memory",
        ),
    ),
    Mutant(
        "forward-prefetch-is-forgotten",
        "FS2-PREF-03",
        "set_modules_to_forward_prefetch has no effect.",
        replace("IterationState.pre_forward", "$unit.policy.prefetch_in_forward or ()", "()"),
    ),
    # --- engine/lifetime.py ---
    Mutant(
        "freed-but-still-there",
        "SHARD-13",
        "Resharding a unit does not release its memory.",
        remove("release", "$storage_owner.untyped_storage().resize_(0)"),
    ),
    Mutant(
        "limiter-one-too-many",
        "LIM-02",
        "The queue of releases never counts as full.",
        replace(
            "RateLimiter.throttle", "len(self._events) < self.num_in_flight", "len(self._events) <= self.num_in_flight"
        ),
    ),
    # --- checks/optimizer_checks.py ---
    Mutant(
        "step-on-unreduced-gradients",
        "NOSYNC-10",
        "Clipping and step() accept gradients that were never reduced.",
        replace("check_reduced", "$layout.has_unreduced", "False"),
    ),
    Mutant(
        "unreduced-gradients-are-not-announced",
        "NOSYNC-10",
        "A step on gradients that wait for a reduction is not checked.",
        remove("IterationState.post_backward", "for $observer in $observers:\n    $observer.unreduced(unit.layout)"),
    ),
    Mutant(
        "stale-optimizer-is-silent",
        "CTOR-05",
        "An optimizer that holds parameters replaced by sharding causes no warning.",
        remove("OptimizerChecks.new_optimizer", "warn(message('stale-optimizer', ...))"),
    ),
    Mutant(
        "every-optimizer-counts",
        "FRESH-06",
        "After another optimizer's step on one rank, only that rank issues an all-gather.",
        replace("OptimizerSteps._layouts_of", "[$layout for $layout in layouts if $is_held]", "layouts"),
    ),
    # --- engine/precision.py ---
    Mutant(
        "inputs-are-copied-behind-the-back",
        "STREAM-13",
        "The forward begins before the copy of its inputs to the device is complete.",
        replace("move", "$t.to($device)", "$t.to($device, non_blocking=True)"),
    ),
    Mutant(
        "outputs-in-dicts-are-not-watched",
        "FS2-13",
        "Outputs inside a dict get no pre-backward hook.",
        replace("tensors_in", "$value.values()", "()"),
    ),
    Mutant(
        "one-order-of-a-packed-sequence",
        "DEV-08",
        "The sequences of an unsorted packed sequence change places.",
        replace(
            "map_tensors",
            "type($value)($data, $sizes, $order, $inverse)",
            "type($value)($data, $sizes, $order, $order)",
        ),
    ),
    # --- cases/requested_parameters.py ---
    Mutant(
        "requested-parameters-get-nothing",
        "PROG-20",
        "backward(inputs=parameters) computes no gradient and raises no error.",
        replace("RequestedParameters._compute", "$inputs and $gradient is not None", "False and $gradient is not None"),
    ),
    # --- engine/root.py ---
    Mutant(
        "failed-forward-is-not-mended",
        "NEW-15",
        "An error in forward does not reset the state of the units.",
        remove("RootState.fail_forward", "self.iteration.recover()"),
    ),
    Mutant(
        "keeps-the-dtype-before-a-conversion",
        "GRAD-04",
        "A converted model reduces in its old dtype.",
        never("RootState._prepare", "$unit.layout.dtype is not $unit.plans[0].computed_in"),
    ),
    Mutant(
        "a-second-thread-may-call",
        "AGREE-08",
        "Two threads use the memory of one model.",
        never("RootState.check_thread", "self._thread not in (0, get_ident()) and graph_task() == NOT_IN_BACKWARD"),
    ),
    # --- engine/schedule.py ---
    Mutant(
        "next-in-backward-is-the-one-after",
        "PREF-08 PREF-02",
        "Backward prefetches the unit whose backward has just ended.",
        replace(
            "Schedule.next_backward",
            "self._left[$position - 1] if $position else None",
            "self._left[$position + 1] if $position + 1 < len(self._left) else None",
        ),
    ),
    Mutant(
        "forward-prefetch-in-the-first-iteration",
        "PREF-12",
        "Every iteration counts as the first one, so forward never prefetches.",
        never("ForwardOrder._backward_ends", "self._order"),
    ),
    # --- cases/side_outputs.py ---
    Mutant(
        "kept-tensors-collect-hooks",
        "PROG-99",
        "Each forward adds a hook to a tensor that a module keeps.",
        replace(
            "SideOutputs.watch_attributes",
            "$unit.uses.awaits_backward and $tensor not in self._watched",
            "$unit.uses.awaits_backward",
        ),
    ),
    # --- engine/unit.py ---
    Mutant(
        "unlimited-gathers",
        "LIM-02",
        "An all-gather does not wait for the rate limiter.",
        remove("Unit.unshard", "self.root.limiter.throttle(self.name)"),
    ),
    Mutant(
        "reduces-in-full-precision",
        "MP-06",
        "Without a reduce_dtype gradients are reduced in full precision instead of param_dtype.",
        replace(
            "Unit.plan_reductions",
            "self.layout.precision.reduces_in(self.layout.dtype)",
            "self.layout.precision.reduces_in(self.layout.local_parameters[0].dtype)",
        ),
    ),
]
