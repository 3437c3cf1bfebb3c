"""Mutants of SAVE: saving leaves the model unchanged."""

from __future__ import annotations

from spec_tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        "expanded-buffers-are-filled",
        "copy_shared",
        "slice(None) if stride else slice(1)",
        "slice(None)",
        "A copy of an expanded buffer allocates memory for all its elements.",
        "SAVE-01",
    ),
    Mutant(
        "every-key-has-a-copy",
        "copy_shared",
        "        if same not in copies:\n",
        "        if True:\n",
        "Two keys of one tensor get two copies.",
        "SAVE-01",
    ),
    Mutant(
        "saved-values-are-not-copied-later",
        "Wrapper._copy_shared_values",
        "            if (value := reference()) is not None:",
        "            if (value := reference()) is not None and False:",
        "Values that a state dict shares with an idle model change with the next forward.",
        "SAVE-01",
    ),
    Mutant(
        "values-are-shared-before-a-step",
        "_unchanged_until_forward",
        "one.grad is None and ",
        "",
        "A state dict shares an ignored parameter with the model although an optimizer step can follow.",
        "SAVE-01",
    ),
    Mutant(
        "values-are-shared-before-backward",
        "_unchanged_until_forward",
        "    if any(unit.phase is not Phase.IDLE or unit.awaits_backward for unit in units):",
        "    if False:",
        "A state dict shares buffers with the model although a backward or an edit of full parameters can follow.",
        "SAVE-01",
    ),
    Mutant(
        "loading-changes-saved-values",
        "before_walk",
        "    wrapper._copy_shared_values()\n",
        "",
        "Loading changes the values of a state dict that was saved before.",
        "SAVE-01",
    ),
    Mutant(
        "idle-models-are-copied",
        "copy_shared",
        "where in unchanged",
        "False",
        "Buffers and ignored parameters of an idle model are copied at once.",
        "SAVE-01",
    ),
    Mutant(
        "entries-of-others-are-dropped",
        "after_walk",
        "            if state[key] is not before.get(key):",
        "            if True:",
        "With rank0_only, a rank drops the entries of other models.",
        "SAVE-02",
    ),
    Mutant(
        "entries-of-others-are-copied",
        "save",
        " and state[key] is not kept.before.get(key)",
        "",
        "Entries of other models are replaced by copies.",
        "SAVE-02",
    ),
    Mutant(
        "inner-rows-are-dropped",
        "after_walk",
        " and not key.startswith(others)",
        "",
        "With rank0_only, a rank drops the rows of an inner sharded unit.",
        "SAVE-02",
    ),
    Mutant(
        "versions-stay-under-paths",
        "after_walk",
        '    for path in [path for path in versions if (path + ".").startswith(inner)]:\n',
        "    for path in []:\n",
        "A plain module does not find the versions in a wrapper's dict.",
        "SAVE-03",
    ),
    Mutant(
        "versions-are-not-found",
        "load",
        'if getattr(state, "_metadata", None):',
        "if False:",
        "A wrapper does not find the versions in a plain module's dict.",
        "SAVE-03",
    ),
    Mutant(
        "names-are-not-escaped",
        "Explanation._repr_html_",
        "TEMPLATES.get_template",
        "TEMPLATES.overlay(autoescape=False).get_template",
        "The HTML page does not escape a module's name.",
        "SAVE-09",
    ),
]
