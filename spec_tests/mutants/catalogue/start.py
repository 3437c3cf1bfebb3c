"""Mutants of START: a new machine, and names that other programs use."""

from __future__ import annotations

from spec_tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        "a-folder-called-minifsdp-is-the-package",
        "warn",
        'frame.f_globals.get("__name__", "").partition(".")[0] in NOT_THE_PROGRAM:',
        '"minifsdp" in frame.f_code.co_filename:',
        "A warning searches for the package's name in file paths.",
        "START-01",
    ),
    Mutant(
        "fully-shard-needs-a-group-before-it",
        "_default_mesh",
        "torch.distributed.init_process_group()",
        "raise ValueError()",
        "fully_shard does not initialize the default process group from the launcher's environment.",
        "START-02",
    ),
    Mutant(
        "every-function-has-a-process-group-argument",
        "token_scale",
        'default_group("group")',
        "default_group()",
        "The message of token_scale names an argument that token_scale refuses.",
        "START-03",
    ),
    Mutant(
        "messages-name-no-command",
        "message",
        ", {COMMAND}{entry}",
        "",
        "A message contains only a link to the page and no command for offline use.",
        "START-05",
    ),
    Mutant(
        "an-entry-needs-its-bare-name",
        "explanation",
        'entry.rpartition("#")[2].removeprefix("E-")',
        "entry",
        "explain-error does not accept the entry as written in the message.",
        "START-05",
    ),
    Mutant(
        "the-list-of-tools-is-empty",
        "main",
        "TOOLS.strip() if",
        '"" if',
        "python -m minifsdp lists nothing.",
        "START-06",
    ),
    Mutant(
        "the-mesh-after-forward-is-always-there",
        "ParamGroup.post_forward_mesh_info",
        "if not policy.reshard_after_forward:",
        "if False:",
        "A group that keeps its parameters unsharded after forward has a mesh for them.",
        "START-07",
    ),
    Mutant(
        "gradients-are-always-synchronized",
        "reduces_gradients",
        "all(unit.policy.reduces for unit in units)",
        "True",
        "_sync_gradients is true in no_sync().",
        "START-08",
    ),
    Mutant(
        "the-final-callback-does-nothing",
        "FullyShardedDataParallel._exec_order_data",
        "self._current_root_state().recover_after_error",
        "lambda: None",
        "Torch's final callback leaves units unsharded after a backward that has failed.",
        "START-09",
    ),
]
