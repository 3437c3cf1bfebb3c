"""Mutants of tools that compute and report, and of helpers for programs."""

from __future__ import annotations

from spec_tests.harness.edit import always, remove, replace
from spec_tools.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    # --- debugging/explain_error.py ---
    Mutant(
        "an-entry-needs-its-bare-name",
        "START-05",
        "explain-error does not accept the entry as written in the message.",
        replace("explanation", "$entry.rpartition('#')[2].removeprefix('E-')", "$entry"),
    ),
    # --- arguments.py ---
    Mutant(
        "nan-is-a-number",
        "CLIP-01",
        "`clip_grad_norm_(nan)` turns all gradients into nan.",
        replace("_is_number", "not math.isnan(float($value))", "float($value) is not None"),
    ),
    # --- batches.py ---
    Mutant(
        "tokens-of-this-rank",
        "BATCH-06",
        "The weight of a token depends on the number of tokens on its rank.",
        remove("token_scale", "collectives.all_reduce($ranks, $total, kind='token_scale').wait()"),
    ),
    # --- minifsdp_tools/activations.py ---
    Mutant(
        "nothing-comes-out-of-a-matrix",
        "COST-16",
        "The estimate of activations counts the inputs of a matrix product but not its outputs.",
        replace("activation_bytes", "map(sum, $matrices)", "(matrix[1] for matrix in $matrices)"),
    ),
    # --- minifsdp_tools/cost.py ---
    Mutant(
        "kept-units-are-gathered-again",
        "COST-06",
        "The calculator counts as many all-gathers for SHARD_GRAD_OP as for FULL_SHARD.",
        replace(
            "_gathers", "($job.num_reductions, $job.num_reductions)", "(2 * $job.micro_batches, 2 * $job.micro_batches)"
        ),
    ),
    Mutant(
        "offloaded-states-are-priced-here",
        "COST-02",
        "The calculator counts offloaded states as memory of the device.",
        replace("cost_of", "(0.0, $states) if $job.offload else ($states, 0.0)", "($states, 0.0)"),
    ),
    # --- minifsdp_tools/explain.py ---
    Mutant(
        "equal-units-have-a-line-each",
        "EXPLAIN-12",
        "Equal units that follow each other do not share a line of the table.",
        replace(
            "_lines_of_units",
            "itertools.groupby($units, $columns)",
            "(($columns(unit), [unit]) for unit in $units)",
        ),
    ),
    Mutant(
        "a-hundred-percent-are-the-border",
        "EXPLAIN-06",
        "explain() does not warn of a unit that contains nearly the whole model.",
        replace("advice_for", "DOMINANT * $total", "$total"),
    ),
    Mutant(
        "small-beside-a-small-one",
        "EXPLAIN-07",
        "explain() warns of small units although every unit is small.",
        replace("advice_for", "min(KNEE, max($largest / 10, $total / 100))", "KNEE"),
    ),
    # --- minifsdp_tools/explain_records.py ---
    Mutant(
        "frozen-parts-have-states",
        "EXPLAIN-04",
        "explain() counts optimizer states for frozen parameters.",
        always("UnitSummary.trained_shapes", "$parameter.trained"),
    ),
    # --- minifsdp_tools/explain_units.py ---
    Mutant(
        "a-tie-has-one-name",
        "EXPLAIN-08",
        "explain() does not detect that a parameter is used in several places.",
        replace("_places", "tuple($ties)", "()"),
    ),
    Mutant(
        "the-last-rank-owns-what-the-first-does",
        "EXPLAIN-02",
        "explain() reports the elements of rank 0 for every rank.",
        replace("_elements_in_flat", "$sharding.param_ranges($index)", "$sharding.param_ranges(0)"),
    ),
    Mutant(
        "the-root-is-gathered-twice",
        "EXPLAIN-03",
        "explain() counts an all-gather of the root before its backward.",
        replace("_existing", "$frees and not $stays", "$frees"),
    ),
    Mutant(
        "a-planned-unit-is-never-flat",
        "EXPLAIN-05",
        "explain() plans a flat unit with the padding of single parameters.",
        always("_planned", "$like.per_parameter"),
    ),
    # --- minifsdp_tools/formulas.py ---
    Mutant(
        "rows-are-priced-without-padding",
        "COST-02",
        "The calculator omits padding.",
        replace("padded_flat", "-(-$numel // $num_shards) * $num_shards", "$numel"),
    ),
    # --- minifsdp_tools/job.py ---
    Mutant(
        "stage-two-keeps-gradients-whole",
        "COST-02",
        "The calculator does not shard the gradients that are stored after backward.",
        replace(
            "Job.settled",
            "$size * self.stored.itemsize / self.width / self.shards",
            "$size * self.stored.itemsize / self.width",
        ),
    ),
    Mutant(
        "activations-outlive-their-unit",
        "COST-20",
        "The backward of each unit counts the activations of all units.",
        replace("Job.kept", "self.activations[:$num + 1]", "self.activations"),
    ),
    # --- minifsdp_tools/links.py ---
    Mutant(
        "replicas-are-neighbours",
        "COST-15",
        "The calculator's all-reduce ring connects consecutive ranks instead of replicas.",
        replace("sent_by_link", "($sent['AR'], $job.num_replicas, $job.shards)", "($sent['AR'], $job.num_replicas, 1)"),
    ),
    # --- minifsdp_tools/peaks.py ---
    Mutant(
        "last-moment-for-the-worst",
        "COST-03",
        "The peak of forward is the memory at its end instead of the maximum.",
        replace("peak_of_forward", "max($moments)", "$moments[-1]"),
    ),
    # --- minifsdp_tools/timeline.py ---
    Mutant(
        "names-in-pictures-are-not-escaped",
        "SAVE-09",
        "A name of a module is markup in the picture of a timeline.",
        replace("_Sheet.text", "_SHAPES.lines(...)", 'str(_SHAPES.lines(...)).replace("&lt;", "<")'),
    ),
]
