"""Rules for the package: short files, a complete list of modules, one vocabulary, and limits on the code size.

A number here is a limit. Lower it if the package becomes smaller. If you raise it, give the reason in the commit.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "minifsdp"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

pytestmark = pytest.mark.pure

# Limits on code lines by folder. "core" are the modules listed under "core" in docs/modules.md. The transport between
# CPUs has its own limit. "package" is everything that has no limit of its own.
TRANSPORT, DEBUGGING, ARGUMENTS = "engine/gloo.py", "debugging/", "arguments.py"
# No other module calls the tools, which count and draw. The modules whose names begin with the second prefix explain
# a given model.
TOOLS, EXPLAIN = "tools/", "tools/explain"
# The step simulator, which no module imports.
SIMULATE = "simulate/"
# The command line counts as a tool: no module imports it.
COMMAND = "__main__.py"
# The exercises, which no module imports.
LEARN = "learn/"
WATCHDOG = "watchdog/"
# These also have limits of their own: the checks that all ranks do the same, the parts that are off by default, and the
# types of arguments of the public API.
APART = (
    TRANSPORT,
    DEBUGGING,
    ARGUMENTS,
    TOOLS,
    SIMULATE,
    LEARN,
    COMMAND,
    "batches.py",
    "engine/collective_log.py",
    "engine/rank_checks.py",
    WATCHDOG,
    "ledger.py",
)
BUDGETS = {
    # Names of torch that other programs read: 34 lines. The state of a module after an evaluation, and a count of steps
    # per root: 44. Gradients that share memory, and their dtypes: 50. The order check of each unit: 12. Devices that
    # are not the current device, streams of an earlier root, and errors of devices: 17. A received full state dict that
    # no rank stores: 17. A meta device as device_id: 2. Penalties that no output of a unit contains, and gradients,
    # buffers and views of weights that share memory: 28. Memory formats of weights: 18.
    # State dicts of compiled models and of submodules: 18. Gradients of hidden states, and losses inside a forward: 27.
    # Memory that several streams of the user read, and dtypes that backends cannot send: 8.
    "package": 6830,
    "core": 3289,
    # Messages of a new order have their own tags: 9 lines.
    TRANSPORT: 179,
    DEBUGGING: 322,
    ARGUMENTS: 48,
    "batches.py": 71,
    # Units are identified by their parameters, not by their names in a message: 35 lines.
    "engine/collective_log.py": 163,
    "engine/rank_checks.py": 141,
    # Includes the location of the error in a program that is about to end, fast answers after a query, and ranks killed
    # on this machine. It ends with its process group, and restores what it replaced.
    WATCHDOG: 491,
    "ledger.py": 46,
    "checkpoint/": 1189,
    "compat/": 358,
    # The calculator includes data in flight between CPUs, and the time at which a unit's activations are freed.
    TOOLS: 485,
    # The list of tools, and the explanation of an error message.
    COMMAND: 32,
    # For a given model it reports which ranks send between CPUs, and whether reductions overlap.
    EXPLAIN: 468,
    # A recording, a replay, models by name, a search and a command.
    SIMULATE: 1247,
    # The commands, the grader, and the checks of ten exercises.
    LEARN: 1007,
}
LONGEST_FILE = 300  # including prose
LONGER = {
    # Describes the arguments of six configurations.
    "checkpoint/state_dict_options.py": 308,
    "engine/collective_log.py": 343,
    "fsdp1/wrapper.py": 329,
    "engine/flat.py": 410,
    "engine/gloo.py": 323,
    "engine/hooks.py": 381,
    "engine/layout.py": 338,
    "engine/unit.py": 323,
    # Lists every public method of a sharded module.
    "fsdp2/module.py": 315,
    "engine/per_param.py": 377,
    "engine/reduce.py": 356,
    # Lists every public method of the wrapper.
    "fully_sharded_data_parallel.py": 578,
    "watchdog/report.py": 370,
}
LONGEST_FUNCTION = 35  # in lines of code
LONGER_FUNCTIONS = {
    ("engine/flat.py", "__init__"): 43,
    ("engine/root.py", "__init__"): 40,
    # 17 arguments, most of them on two lines.
    ("fully_sharded_data_parallel.py", "__init__"): 47,
}
# Words for which PyTorch has other terms, and words for people where ranks, users and modules are meant.
BANNED = (
    r"\b(main road|trouble|loan|lent|roll call|roll_call|sentence|own code|own_code|animal|"
    r"somebody|nobody(?!-to-shard-with)|his|he)\b"
)
# A module that is only an import path has no comparison with torch.
PATHS = {"api.py", "checkpoint_wrapper.py", "cost.py", "sharded_grad_scaler.py", "timeline.py", "wrap.py"}


def text_of(module: str) -> str:
    return (PACKAGE / module).read_text(encoding="utf-8")


def num_code_lines(module: str) -> int:
    return len(code_lines(module))


def code_lines(module: str) -> set[int]:
    """Numbers of lines with code: not blank, not a comment, not a docstring."""
    text = text_of(module)
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - prose


# Code lines of all modules that `fully_shard` imports, without the parts that no training step needs.
# `bucket` imports `extension` directly: 112 of these.
FULLY_SHARD = 3074
NOT_FOR_A_STEP = (
    "checkpoint/",
    "compat/",
    "arguments.py",
    "engine/optimizer_watch.py",
    "fsdp2/initial.py",
    "fsdp2/module.py",
    "engine/gloo.py",
    "watchdog/",
)


def imported_for(module: str) -> set[str]:
    """The modules of the package that ``module`` imports for a training step, directly or indirectly."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found and not name.startswith(NOT_FOR_A_STEP):
            found.add(name)
            for node in ast.walk(ast.parse(text_of(name))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minifsdp"):
                    parts = [node.module or "", *(f"{node.module}.{one.name}" for one in node.names)]
                    files = [part.removeprefix("minifsdp.").replace(".", "/") + ".py" for part in parts]
                    waiting.extend(file for file in files if file in MODULES)
    return found


def test_fully_shard_imports_limited_code() -> None:
    imported = [
        one for one in imported_for("fsdp2/fully_shard.py") if not one.startswith((TRANSPORT, WATCHDOG, "ledger"))
    ]
    assert sum(map(num_code_lines, imported)) <= FULLY_SHARD


def core_modules() -> list[str]:
    text = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8")
    return re.findall(r"`([\w/]+\.py)`", text.partition("* [core]")[2].partition("\n* ")[0])


@pytest.mark.parametrize("room", BUDGETS)
def test_each_folder_stays_within_code_limit(room: str) -> None:
    special = {
        "core": core_modules(),
        "package": [module for module in MODULES if not module.startswith(APART)],
        TOOLS: [module for module in MODULES if module.startswith(TOOLS) and not module.startswith(EXPLAIN)],
    }
    modules = special.get(room) or [module for module in MODULES if module.startswith(room)]
    assert sum(map(num_code_lines, modules)) <= BUDGETS[room]


# The function that users call, and the state that libraries read.
CALLS_OTHER_PARTS = ["fsdp2/fsdp_state.py", "fsdp2/fully_shard.py"]


def test_core_does_not_import_the_other_parts() -> None:
    others = re.compile(r"(from|import) minifsdp\.(checkpoint|compat|debugging|tools)\b")
    assert [module for module in core_modules() if others.search(text_of(module))] == CALLS_OTHER_PARTS
    assert not re.search(r"minifsdp\.(debugging|tools)\b", "".join(map(text_of, CALLS_OTHER_PARTS)))


@pytest.mark.parametrize("module", MODULES)
def test_module_file_has_limited_length(module: str) -> None:
    assert len(text_of(module).splitlines()) <= LONGER.get(module, LONGEST_FILE)


def test_short_file_has_no_exception_for_its_length() -> None:
    assert [module for module in LONGER if len(text_of(module).splitlines()) <= LONGEST_FILE] == []


@pytest.mark.parametrize("module", MODULES)
def test_function_has_limited_length(module: str) -> None:
    lines = code_lines(module)
    for node in ast.walk(ast.parse(text_of(module))):
        if isinstance(node, ast.FunctionDef):
            length = len(lines & {*range(node.lineno, (node.end_lineno or 0) + 1)})
            assert length <= LONGER_FUNCTIONS.get((module, node.name), LONGEST_FUNCTION), node.name


@pytest.mark.parametrize("module", [*MODULES, "messages.toml"])
def test_vocabulary_is_that_of_pytorch(module: str) -> None:
    lines = enumerate(text_of(module).splitlines(), 1)
    assert [f"line {number}: {line.strip()}" for number, line in lines if re.search(BANNED, line, re.IGNORECASE)] == []


def test_layers_on_the_map_equal_those_of_the_import_contract() -> None:
    (contract, *_) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = {
        module.removeprefix("minifsdp.").replace(".", "/") + ("" if "." in module[9:] else "/"): number
        for number, layer in enumerate(reversed(contract["layers"]), 1)
        for module in layer.split(" | ")
    }
    drawn: dict[str, int] = {}
    for number, named in re.findall(r"^\| (\d+) \| (.*?) \|", (ROOT / "docs" / "modules.md").read_text(), re.MULTILINE):
        drawn.update((name, int(number)) for name in re.findall(r"`([\w/]+)(?:\.py)?`", named))
    known = {name: number for name, number in floors.items() if name in drawn or name.startswith("engine/")}
    assert drawn | known == drawn


@pytest.mark.parametrize("module", [m for m in MODULES if not m.endswith("__init__.py")])
def test_every_module_is_on_the_map_with_the_behaviour_of_torch(module: str) -> None:
    named = re.findall(r"`([\w/*]+\.py)`", (ROOT / "docs" / "modules.md").read_text(encoding="utf-8"))
    assert any(re.fullmatch(name.replace(".", r"\.").replace("*", r"\w*"), module) for name in named)
    assert module in PATHS or "*In torch:*" in text_of(module)
