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
        "entries-of-others-are-dropped",
        "after_walk",
        "            if state[key] is not before.get(key):",
        "            if True:",
        "With rank0_only, a rank drops the entries of other models.",
        "SAVE-02",
    ),
    Mutant(
        "entries-of-others-are-copied",
        "copy_shared",
        "if state[key] is not before.get(key):",
        "if True:",
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
        "autoescape=True",
        "autoescape=False",
        "The HTML page does not escape a module's name.",
        "SAVE-09",
    ),
]
