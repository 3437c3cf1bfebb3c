"""The reading order: FSDP2 and FSDP1 first, then every other module, each once.

A module is named by its path inside the package: ``engine/unit.py``. Tutorials have the same kind of page and are named
by their path in the repository: ``tutorials/overlap.py``.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["PACKAGE", "ROOT", "SECTIONS", "all_modules", "path_of", "reading_order"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minifsdp"

# Each section has a heading, a sentence, and modules in order. All modules that are not listed here follow in the last
# section of their folder.
SECTIONS: list[tuple[str, str, list[str]]] = [
    (
        "FSDP2: `fully_shard`",
        "Eleven modules, a complete FSDP2. Start here.",
        [
            "engine/layout.py",
            "engine/bucket.py",
            "engine/per_param.py",
            "engine/unit.py",
            "engine/hooks.py",
            "engine/reduce.py",
            "engine/schedule.py",
            "engine/lifetime.py",
            "engine/root.py",
            "fsdp2/fsdp_state.py",
            "fsdp2/fully_shard.py",
        ],
    ),
    (
        "FSDP1: `FullyShardedDataParallel`",
        "The same engine with another layout, and the wrapper.",
        ["engine/flat.py", "fsdp1/wrapper.py", "checkpoint/state_dict.py", "checkpoint/optim_state.py"],
    ),
    (
        "Lower modules of the engine",
        "Read these when one of the pages above names them.",
        [
            "engine/mesh.py",
            "engine/comm_streams.py",
            "engine/collectives.py",
            "engine/gloo.py",
            "engine/precision.py",
            "engine/shards.py",
            "engine/sharded_param.py",
            "engine/flat_tensor.py",
            "engine/flat_params.py",
            "engine/flat_gradients.py",
            "engine/extension.py",
            "engine/placeholder.py",
            "engine/messages.py",
            "engine/validation.py",
            "engine/optimizer_watch.py",
            "engine/rank_checks.py",
            "engine/collective_log.py",
            "engine/backward_hooks.py",
        ],
    ),
    (
        "Behind FSDP2",
        "Additional modules of `fully_shard`.",
        [
            "fsdp2/module.py",
            "fsdp2/functions.py",
            "fsdp2/options.py",
            "fsdp2/initial.py",
            "fsdp2/reshard.py",
        ],
    ),
    (
        "Behind FSDP1",
        "Additional modules of the wrapper.",
        [
            "fsdp1/options.py",
            "fsdp1/policies.py",
            "fsdp1/wrap.py",
            "fsdp1/build.py",
            "fsdp1/ignored.py",
            "fsdp1/initial.py",
            "fsdp1/names.py",
            "fsdp1/training.py",
            "fsdp1/training_aids.py",
            "fsdp1/grad_scaler.py",
            "fsdp1/full_params.py",
            "fsdp1/compiling.py",
        ],
    ),
    (
        "Checkpoints",
        "Attached to FSDP1 and FSDP2: state dicts of models and optimizers.",
        [
            "checkpoint/state_dict_options.py",
            "checkpoint/codec.py",
            "checkpoint/tensors.py",
            "checkpoint/state_dict_load.py",
            "checkpoint/optim_state_load.py",
            "checkpoint/agreement.py",
            "checkpoint/loading.py",
        ],
    ),
    (
        "Compatibility with older names and frameworks",
        "Attached to FSDP1 and FSDP2: names that programs and libraries use.",
        [
            "compat/legacy.py",
            "compat/optim_state_legacy.py",
            "compat/wrapper_names.py",
            "compat/composable.py",
            "compat/flat_param.py",
            "compat/bfloat16.py",
        ],
    ),
    (
        "The watchdog",
        "Attached to FSDP1 and FSDP2: reports the position of every rank when a collective fails.",
        ["watchdog/watchdog.py", "watchdog/report.py", "watchdog/process.py", "ledger.py"],
    ),
    (
        "Debugging",
        "Only attached while `minifsdp.debug()` is on.",
        [
            "debugging/switch.py",
            "debugging/attach.py",
            "debugging/first_use.py",
            "debugging/weights.py",
            "debugging/values.py",
            "debugging/order.py",
            "debugging/unset.py",
        ],
    ),
    (
        "Around the engine",
        "Recording, drawing, and modules with the names of torch's modules.",
        [
            "trace.py",
            "tools/events.py",
            "tools/timeline.py",
            "tools/chrome_trace.py",
            "tools/formulas.py",
            "tools/job.py",
            "tools/peaks.py",
            "tools/cost.py",
            "tools/activations.py",
            "tools/links.py",
            "tools/explain.py",
            "tools/explain_units.py",
            "tools/explain_records.py",
            "tools/explain_job.py",
            "tools/explain_advice.py",
            "fully_sharded_data_parallel.py",
            "__main__.py",
        ],
    ),
]


def path_of(name: str) -> Path:
    """The path of the file with that name."""
    return (ROOT if name.startswith("tutorials/") else PACKAGE) / name


def all_modules() -> list[str]:
    """Every module of the package, sorted by path."""
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def reading_order() -> list[tuple[str, str, list[str]]]:
    """`SECTIONS` with the existing modules; all other modules are added to the last section of their folder."""
    existing = all_modules()
    sections = [(title, line, [name for name in names if name in existing]) for title, line, names in SECTIONS]
    named = {name for _, _, names in sections for name in names}
    # Modules that only re-export names come last, and so do modules outside of all folders.
    last = {
        folder: n for n, (_, _, names) in enumerate(SECTIONS) for folder in {name.rpartition("/")[0] for name in names}
    }
    for name in existing:
        if name not in named:
            folder = "" if name.endswith("__init__.py") else name.rpartition("/")[0]
            sections[last[folder]][2].append(name)
    return sections
