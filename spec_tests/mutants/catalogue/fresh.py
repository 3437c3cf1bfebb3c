"""Mutants of FRESH: sharded parameters after an evaluation, and up-to-date weights in the next forward."""

from __future__ import annotations

from spec_tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        "unsharded-parameters-after-an-evaluation",
        "RootState.end_forward",
        "                unit.layout.use_sharded_params()\n",
        "                pass\n",
        "Modules that keep their memory still register unsharded parameters after an evaluation.",
        "FRESH-01",
    ),
    Mutant(
        "root-is-kept-after-an-evaluation",
        "IterationState._frees_after_forward",
        "return unit.policy.reshard_after_evaluation and unit.policy.reshard_after_backward and not self.is_recorded",
        "return False",
        "After an evaluation the root of fully_shard stays unsharded, so the next one misses an edit.",
        "FRESH-02 FRESH-03",
    ),
    Mutant(
        "evaluation-memory-serves-training",
        "RootState._prepare",
        "is_unwanted or ",
        "",
        "A recorded forward uses parameters that an evaluation has all-gathered.",
        "FRESH-03",
    ),
    Mutant(
        "choice-to-keep-does-not-reach-evaluations",
        "choose_reshard",
        "reshard_after_evaluation=frees",
        "reshard_after_evaluation=True",
        "reshard_after_forward=False reshards the parameters after each evaluation.",
        "FRESH-03",
    ),
    Mutant(
        "steps-are-not-counted-for-dtensors",
        "PerParameterLayout._stamp",
        "return self.steps.count, ",
        "return 0, ",
        "An optimizer step with list operators on DTensors is not detected.",
        "FRESH-04",
    ),
    Mutant(
        "kept-flat-units-are-always-stale",
        "FlatLayout.all_gather",
        "self.steps.count, self.registered.stamp()",
        "-1, self.registered.stamp()",
        "A unit is all-gathered again in each forward.",
        "FRESH-03",
    ),
    Mutant(
        "a-closure-is-no-part-of-the-step",
        "OptimizerWatch._before_step.checked_closure",
        "            self._count_step(optimizer)\n            return loss",
        "            return loss",
        "Parameters all-gathered in a closure count as newer than the step that follows.",
        "FRESH-04",
    ),
    Mutant(
        "old-cast-is-kept",
        "FlatLayout.is_stale",
        "self.is_copied or ",
        "",
        "NO_SHARD keeps an outdated copy in another dtype.",
        "FRESH-05",
    ),
    Mutant(
        "every-optimizer-counts",
        "OptimizerWatch._layouts_of",
        "for layout in self._layouts if not held.isdisjoint(layout.local_parameters())]",
        "for layout in self._layouts]",
        "After another optimizer's step on one rank, only that rank issues an all-gather.",
        "FRESH-06",
    ),
    Mutant(
        "hook-for-steps-stays",
        "OptimizerWatch._end",
        "            self._hook.remove()\n",
        "            pass\n",
        "The optimizer step hook remains after the last unit is deleted.",
        "FRESH-06",
    ),
    Mutant(
        "local-steps-are-refused",
        "OptimizerWatch.check_reduced",
        " and layout.all_gather_group is not None",
        "",
        "A step on unreduced gradients is also refused where nothing is sharded.",
        "FRESH-07",
    ),
    Mutant(
        "evaluation-rounds-its-gradients",
        "Wrapper._choose_precision",
        "                if stored:\n                    unit.plan.use(unit.layout.dtype)\n",
        "",
        "A backward in evaluation mode reduces in low precision.",
        "FRESH-08",
    ),
    Mutant(
        "gradients-of-the-other-precision-are-lost",
        "FlatLayout.take_gradient",
        "if len(self._variants) > 1 else ()",
        "if len(self._variants) > 2 else ()",
        "A backward over two forwards, one in evaluation mode, loses the gradient of one of them.",
        "FRESH-08",
    ),
    Mutant(
        "wrong-module-is-asked-for-its-mode",
        "Wrapper._choose_precision",
        "not wrapper.module.training",
        "not wrapper.training",
        "The precision depends on the mode of the wrapper instead of the module.",
        "FRESH-08",
    ),
]
