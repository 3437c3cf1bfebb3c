"""Mutants of `fully_shard`."""

from __future__ import annotations

from spec_tests.harness.edit import always, never, remove, replace
from spec_tools.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    # --- fsdp2/fsdp_state.py ---
    Mutant(
        "inputs-are-never-cast",
        "FS2-MP-05",
        "Inputs are never cast.",
        never(
            "FSDPState.pre_forward", "self._mp_policy.param_dtype is not None and self._mp_policy.cast_forward_inputs"
        ),
    ),
    Mutant(
        "group-is-freed-after-its-first-module",
        "NEW-04",
        "A unit of several modules is resharded after its first module.",
        always("StateOfList.leave", "not self._waiting"),
    ),
    Mutant(
        "every-call-is-an-inner-one",
        "NEW-15",
        "A forward after an aborted one counts as a nested call.",
        remove("FSDPState.fail_calls", "del self.running[$num_running:]"),
    ),
    # --- fsdp2/fully_shard.py ---
    Mutant(
        "override-of-a-policy-is-ignored",
        "NEW-18",
        "The dtypes that a policy chooses for some parameters are ignored.",
        remove("check_options", 'if getattr($policy, "param_dtype_override_fn", None) is not None:\n    ...'),
    ),
    Mutant(
        "replicas-over-the-shard-axis",
        "FS2-18",
        "A mesh of two axes is read as (shard, replicate).",
        replace(
            "_groups_of",
            "MeshGroups.hybrid(shard=$shard, replicate=$replicate)",
            "MeshGroups.hybrid(shard=$replicate, replicate=$shard)",
        ),
    ),
    Mutant(
        "offload-policy-is-ignored",
        "FS2-OFF-01",
        "CPUOffloadPolicy offloads nothing.",
        replace("fully_shard", "isinstance(offload_policy, CPUOffloadPolicy)", "False"),
        "simulated",
    ),
    Mutant(
        "placement-function-is-not-asked",
        "FS2-08",
        "Every parameter is sharded along its first dimension.",
        replace("_sharded_params", "$placement_fn($parameter) if $placement_fn else None", "None"),
    ),
    # --- cases/manual_finalization.py ---
    Mutant(
        "partial-gradients-are-finalized",
        "NEW-25",
        "A gradient that is not all-reduced stays on each replica.",
        remove("_checked", "if any($stays_partial for $plan in $unit.plans):\n    ..."),
    ),
    # --- fsdp2/module.py ---
    Mutant(
        "unshard-shows-old-values",
        "FS2-19",
        "unshard() after a change uses the values from before the change.",
        never("FSDPModule.unshard", "state.unit.layout.is_stale()"),
    ),
    # --- checks/initial_weights.py ---
    Mutant(
        "checksum-without-places",
        "NEW-20",
        "The checksum does not detect two values that are swapped.",
        replace("_checksum_of_bits", "$bits * places", "$bits"),
    ),
    # --- fsdp2/module.py ---
    Mutant(
        "methods-of-torch-are-inherited",
        "NEW-26",
        "A sharded module inherits the methods of torch's class, which need torch's state.",
        replace("sharded_class", "without_methods($theirs, $ours)", "$theirs"),
    ),
    Mutant(
        "every-backward-is-the-last",
        "NEW-07",
        "set_is_last_backward(False) has no effect.",
        replace(
            "FSDPModule.set_is_last_backward",
            "$iteration.is_last_backward = $is_last_backward",
            "$iteration.is_last_backward = True",
        ),
    ),
    Mutant(
        "optimizer-event-is-forgotten",
        "NEW-12",
        "The first all-gather does not wait for the given event.",
        remove(
            "FSDPModule.set_post_optim_event", "self._get_fsdp_state().current_root_state().after_optimizer = $event"
        ),
        "simulated",
    ),
    Mutant(
        "partial-sums-survive-a-reset",
        "NEW-15",
        "reset_iter_state() keeps partial sums that wait for their all-reduce.",
        remove("_discard_unreduced", "$plan.partial = None"),
    ),
    Mutant(
        "zero-grad-misses-the-reduction-in-flight",
        "FUZZ-04",
        "After `set_is_last_backward(False)`, `zero_grad()` keeps the gradient whose reduction is in flight.",
        remove("FSDPModule.zero_grad", "$root_state.iteration.reducer.finish_open()"),
    ),
    # --- fsdp2/module.py ---
    Mutant(
        "reshard-switch-keeps-small-group",
        "NEW-05 NEW-06",
        "After set_reshard_after_forward(True) backward still all-gathers in the smaller group.",
        remove("FSDPModule.set_reshard_after_forward", "leave_smaller_mesh($unit)"),
    ),
]
