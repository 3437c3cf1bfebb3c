"""Mutants of LEGACY, COST, STREAM and the myths; streams have a catalogue of their own, in ``spec_tests/streams``."""

from __future__ import annotations

from spec_tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        "both-spellings-pass",
        "takes_old_spellings",
        "if new in kwargs:",
        "if False:",
        "fsdp_auto_wrap_policy= and auto_wrap_policy= together pass.",
        "LEGACY-01",
    ),
    Mutant(
        "old-third-parameter-is-unknown",
        "_name_of_numel",
        'return "unwrapped_params" if "unwrapped_params" in names else "nonwrapped_numel"',
        'return "nonwrapped_numel"',
        "A policy of the old form cannot be called.",
        "LEGACY-03",
    ),
    Mutant(
        "offload-in-third-place",
        "check_options",
        "if isinstance(sharding_strategy, CPUOffload):",
        "if False:",
        "A CPUOffload in third place is not told apart.",
        "LEGACY-04",
    ),
    Mutant(
        "kept-units-are-gathered-again",
        "_gathers",
        "times = 1 if job.no_sync else job.micro_batches",
        "times = 2 * job.micro_batches",
        "The calculator lets SHARD_GRAD_OP gather as often as FULL_SHARD.",
        "COST-06",
    ),
    Mutant(
        "ring-sends-everything",
        "ring_reduce_scatter_sends",
        "return num_bytes * (num_ranks - 1) / num_ranks",
        "return num_bytes",
        "The calculator forgets that a rank does not send to itself.",
        "COST-06",
    ),
    Mutant(
        "ddp-ignore-list-is-ignored",
        "check_not_in_ddp",
        " and name not in around.parameters_to_ignore",
        "",
        "A DistributedDataParallel around with an ignore list is refused.",
        "MYTH-28",
    ),
    Mutant(
        "offloaded-gradients-stay-between",
        "assign_gradient",
        " and gradient.device == parameter.device",
        "",
        "A gradient of another device is assigned as if it were of the parameter's.",
        "STREAM-08",
    ),
    Mutant(
        "apply-sees-slices",
        "TrainingMethods.apply",
        "with TrainingMethods.summon_full_params(self, recurse=False):",
        "if True:",
        "apply() hands out modules that show no full parameters.",
        "APPLY-01 APPLY-04",
    ),
    Mutant(
        "inputs-that-reach-nobody-are-forgotten",
        "Cycle.end_backward",
        "if not unit.layout.signals_gradient and unit.phase is not Phase.POST_BACKWARD and unit.expects_gradient:",
        "if False:",
        "A fully sharded unit whose inputs ask for no gradient is never reduced.",
        "PAR-05 FS2-13",
    ),
    Mutant(
        "recomputation-finds-slices",
        "Cycle.leave_forward",
        "if graph_task() != NOT_IN_BACKWARD:",
        "if False:",
        "A unit that is computed again in backward is freed before its backward comes.",
        "PAR-07",
    ),
    Mutant(
        "hooks-of-the-first-sum-alone",
        "FlatOwnership.add_reduced",
        "if self.shard._post_accumulate_grad_hooks:",
        "if before is None and self.shard._post_accumulate_grad_hooks:",
        "A hook on a flat parameter is not called when its gradient was added to that of an earlier micro-batch.",
        "PAR-08",
    ),
    Mutant(
        "hooks-of-the-first-sum-alone-per-parameter",
        "PerParameterLayout.accept_gradient",
        "            if hooks:",
        "            if hooks and before is None:",
        "With fully_shard, a hook is not called when a gradient was added to that of an earlier micro-batch.",
        "PAR-08",
    ),
    Mutant(
        "offloaded-copies-are-not-averaged",
        "_end",
        "        plan.scaling.complete(item.piece)",
        "        if replicas is None or plan.mesh.shard is None or not item.layout.offloads:\n"
        "            plan.scaling.complete(item.piece)",
        "An offloaded gradient is not divided under hybrid sharding.",
        "PAR-08",
    ),
    Mutant(
        "half-a-frozen-unit-passes-with-offload",
        "FlatLayout.__init__",
        "            check_uniform_training(home, parameters)",
        "            offload or check_uniform_training(home, parameters)",
        "A flat parameter that is half frozen is refused only where nothing is offloaded.",
        "PAR-09",
    ),
]
