"""Selects the tests for each device, closes the pools, and reports results to the accounting of requirements."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import pathlib
import sys
from collections import Counter
from collections.abc import Callable, Generator
from importlib import metadata

import pytest
import torch
from packaging.requirements import Requirement

from spec_tests.harness import about, accounting, pool, worker
from spec_tests.harness.accounting import (
    Accounting,
    read_rows,
    rows_of_accelerators,
    rows_proven_by,
)

pytest.register_assert_rewrite(*worker.REWRITTEN)

ACCOUNTING = pytest.StashKey[Accounting]()

# Assertions are rewritten here once, and not again by each rank and program. So bytecode is always written.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The number of rows up to which the arguments of a ``parametrize`` are one value.
MOST_TOGETHER = 12

# Folders whose tests start processes that would compute on the CPU.
STARTS_PROGRAMS = (
    "spec_tools/learn",
    "spec_tools/tutorials",
    "spec_tools/processes",
    "docs_build/tests",
    "spec_tools/tests",
)


def pytest_configure(config: pytest.Config) -> None:
    device, engine = config.getoption("--device"), config.getoption("--engine")
    # Test modules import `spec_tests.subject` during the collection, here and on the ranks.
    os.environ["MINIFSDP_SPEC_ENGINE"] = engine
    pool.use_device(device)
    pool.use_limit(config.getoption("--limit"))
    config.addinivalue_line(
        "markers", "needs(requirement): a package that the test extra does not install, or a version"
    )
    config.stash[ACCOUNTING] = Accounting(device, config.rootpath, engine)


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    return True if about.leaves_out_file(config, collection_path) else None


# Before other hooks deselect tests: the requirement IDs of a test that does not run must be valid, too.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    whole_files = not any("::" in argument for argument in config.args) and not config.getoption("lf", False)
    accounting = config.stash[ACCOUNTING]
    accounting.collect(items, whole_files)
    for item in items:
        if not item.get_closest_marker("ranks"):
            item.add_marker("pure")
    choose_rows(config, items)
    about.choose_topics(config, items)
    yield
    leave_out_by_device(config, items)
    if config.getoption("--engine") != "minifsdp":
        leave_out_by_engine(config, items)
    choose_variants(config, items)
    if config.getoption("--quick"):
        chosen = quick_form(items)
        leave_out(config, items, "tests not in the quick form not run (--quick)", lambda item: item not in chosen)
    for requirement in sorted({requirement for item in items for requirement in needs_of(item)}):
        if not is_installed(requirement):
            why = f"tests not run ({requirement} is not installed)"
            leave_out(config, items, why, lambda item: requirement in needs_of(item), in_need=True)
    if not config.option.collectonly and any(item.get_closest_marker("ranks") for item in items):
        pool.start_early()


def choose_rows(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``--spec PREF-03``: only the tests of this requirement."""
    chosen = set(config.getoption("--spec") or [])
    if not chosen:
        return
    if unknown := sorted(chosen - read_rows().keys()):
        raise pytest.UsageError(f"--spec: docs/spec.md has no row {', '.join(unknown)}")
    others = [item for item in items if not chosen & set(rows_proven_by(item))]
    items[:] = [item for item in items if chosen & set(rows_proven_by(item))]
    config.hook.pytest_deselected(items=others)


def leave_out_by_device(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests that a device cannot run, or need not run again."""
    device = config.getoption("--device")
    here = f"--device {device}"
    if device == "cpu":
        leave_out(
            config,
            items,
            "tests of an accelerator not run (--device simulated or cuda)",
            lambda item: item.get_closest_marker("accelerator"),
        )
    else:
        leave_out(config, items, f"tests about the CPU not run ({here})", lambda item: item.get_closest_marker("cpu"))
    if device != "cuda":
        leave_out(config, items, f"tests of real GPUs not run ({here})", lambda item: item.get_closest_marker("gpu"))
    else:
        num_gpus = torch.cuda.device_count()
        what = f"tests that need one GPU for each rank not run ({here} with {num_gpus})"
        leave_out(config, items, what, lambda item: num_own_gpus(item) > num_gpus)
        what = f"tests that need more memory of a GPU not run ({here})"
        leave_out(config, items, what, lambda item: memory_needed(item) * 2**30 > torch.cuda.mem_get_info()[1])
    if device != "simulated":
        what = "tests of the simulation not run (--device simulated)"
        leave_out(config, items, what, lambda item: item.get_closest_marker("simulated"))
    else:
        for why in sorted({marker.args[0] for item in items for marker in item.iter_markers("not_simulated")}):
            leave_out(config, items, f"tests not run ({here}: {why})", lambda item: why in reasons_of(item))
        what = f"tests that start programs of their own not run ({here})"
        leave_out(config, items, what, starts_programs)
        leave_out(
            config,
            items,
            f"tests without ranks not run again ({here})",
            lambda item: not (item.get_closest_marker("ranks") or item.get_closest_marker("accelerator")),
        )
        if not config.getoption("--every-row"):
            rows = rows_of_accelerators()
            what = f"tests of rows that a CPU shows as well not run ({here}, without --every-row)"
            leave_out(config, items, what, lambda item: not (is_marked(item) or rows & set(rows_proven_by(item))))


def leave_out_by_engine(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests that only minifsdp can pass, and adds the warning filters of the engine's adapter."""
    from spec_tests import subject
    from spec_tests.subject.own import use_of

    here = f"--engine {subject.ENGINE}"
    uses = {item: use_of(item) for item in items}
    what = f"tests of minifsdp's own code and of features that only it has not run ({here})"
    leave_out(config, items, what, lambda item: uses[item].own)
    leave_out(config, items, f"tests that use no FSDP not run ({here})", lambda item: not uses[item].public)
    for filter_ in getattr(subject.engine, "FILTERS", ()):
        config.addinivalue_line("filterwarnings", filter_)


def quick_form(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests that noticed a break of the catalogue, without those that start programs, which are slow."""
    record = json.loads((accounting.ROOT / "docs" / "data" / "mutants.json").read_text())["mutants"]
    noticed = {test for one in record.values() for test in one["red"].values()}
    return {item for item in items if item.nodeid in noticed and not starts_programs(item)}


def choose_variants(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``--variants``: deselects variants of parametrized tests."""
    which = config.getoption("--variants") or ("each" if runs_folders(config) else "all")
    if which == "all":
        return
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if isinstance(which, int):
        chosen = {item for variants in by_test.values() for item in variants[:which]}
    else:
        chosen = {item for variants in by_test.values() for item in each_choice(variants)}
    if which == "others":
        chosen = set(items) - chosen
    why = f"variants of tests not run (--variants {which}; all: --variants all)"
    leave_out(config, items, why, lambda item: item not in chosen, counts=False)


def runs_folders(config: pytest.Config) -> bool:
    """Whether the command names folders only, and no file, test, keyword or requirement."""
    chosen = (
        config.getoption("--spec")
        or config.getoption("--about")
        or config.getoption("keyword", "")
        or config.getoption("lf", False)
    )
    return not chosen and all((config.invocation_params.dir / argument).is_dir() for argument in config.args)


def each_choice(variants: list[pytest.Item]) -> list[pytest.Item]:
    """Few variants in which each value of each parameter occurs, chosen so that values occur about equally often."""
    if variants[0].get_closest_marker("in_turn"):
        return in_turn(variants, datetime.date.today().toordinal())
    values = {item: parameter_values(item) for item in variants}
    missing = set().union(*values.values())
    uses: Counter[tuple[str, str]] = Counter()
    chosen: list[pytest.Item] = []
    while missing:
        best = max(
            variants, key=lambda item: (len(values[item] & missing), -sum(uses[value] for value in values[item]))
        )
        chosen.append(best)
        uses.update(values[best])
        missing -= values[best]
    return chosen or variants


def in_turn(variants: list[pytest.Item], day: int) -> list[pytest.Item]:
    """As many variants as the marker ``in_turn(number)`` of their test says, other ones on the next day."""
    (number,) = next(variants[0].iter_markers("in_turn")).args
    first = day * number % len(variants)
    return [*variants, *variants][first : first + min(number, len(variants))]


def parameter_values(item: pytest.Item) -> set[tuple[str, str]]:
    """The values of a variant: for each ``parametrize`` and parametrized fixture, its arguments and their values.

    A ``parametrize`` with more than `MOST_TOGETHER` rows is a table of combinations, so each of its arguments counts.
    """
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    marks = [mark for mark in item.iter_markers("parametrize") if len(mark.args[1]) <= MOST_TOGETHER]
    together = [names_of(mark) for mark in marks]
    of_fixtures = [[name] for name in parameters if not any(name in names for names in together)]
    return {(str(names), repr([parameters.get(name) for name in names])) for names in [*together, *of_fixtures]}


def names_of(mark: pytest.Mark) -> list[str]:
    """The arguments that a ``parametrize`` gives values to."""
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def starts_programs(item: pytest.Item) -> bool:
    """Whether the tests of the item's folder start processes that would compute on the CPU."""
    return item.nodeid.startswith(STARTS_PROGRAMS)


def is_marked(item: pytest.Item) -> bool:
    """Whether a test was written for an accelerator."""
    return bool(item.get_closest_marker("accelerator") or item.get_closest_marker("simulated"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks a variant of a test of both APIs with the requirements of its API."""
    for marker in item.iter_markers("api_spec"):
        is_function = str(item.callspec.params["api"]) == "fully_shard"  # type: ignore[attr-defined]
        rows = marker.kwargs.get("fully_shard" if is_function else "wrapper", [])
        if rows:
            item.add_marker(pytest.mark.spec(*rows))


def reasons_of(item: pytest.Item) -> list[str]:
    """The reasons why a test does not run on the simulated device; empty if it runs."""
    return [marker.args[0] for marker in item.iter_markers("not_simulated")]


def num_own_gpus(item: pytest.Item) -> int:
    """The number of GPUs that a test needs because its ranks cannot share one; 0 if they can."""
    marker = item.get_closest_marker("ranks")
    return int(marker.args[0]) if marker is not None and item.get_closest_marker("own_gpus") else 0


def is_installed(requirement: str) -> bool:
    """Whether a package is installed, ``"IPython"``, and in a version that matches, ``"torch>=2.12"``."""
    needed = Requirement(requirement)
    if importlib.util.find_spec(needed.name) is None:
        return False
    return not needed.specifier or metadata.version(needed.name) in needed.specifier


def memory_needed(item: pytest.Item) -> float:
    """The GiB of memory that the first GPU needs for a test."""
    memory, marker = item.get_closest_marker("gpu_memory"), item.get_closest_marker("ranks")
    if memory is None or marker is None:
        return 0
    ranks_of_gpu = -(-int(marker.args[0]) // max(torch.cuda.device_count(), 1))
    return float(memory.args[0]) * ranks_of_gpu


def needs_of(item: pytest.Item) -> list[str]:
    """The packages that a test needs."""
    return [marker.args[0] for marker in item.iter_markers("needs")]


def leave_out(
    config: pytest.Config,
    items: list[pytest.Item],
    why: str,
    concerned: Callable[[pytest.Item], object],
    *,
    in_need: bool = False,
    counts: bool = True,
) -> None:
    """Deselects tests and reports them at the end of the session, so that they do not count as passed.

    Without ``counts``, a requirement can be proven although these tests do not run.
    """
    left_out = [item for item in items if concerned(item)]
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    config.stash[ACCOUNTING].not_run([item.nodeid for item in left_out], why, in_need=in_need, counts=counts)
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    marks = reversed(list(item.iter_markers("filterwarnings")))
    pool.use_filters(
        [
            *item.config.getini("filterwarnings"),
            *(item.config.getoption("pythonwarnings", None) or []),
            *(text for mark in marks for text in mark.args),
        ]
    )
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.config.stash[ACCOUNTING].note(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    accounting = config.stash[ACCOUNTING]
    if accounting.outcomes:
        accounting.write()
        terminalreporter.section("spec")
        for line in accounting.summary():
            terminalreporter.write_line(line)


# Runs as late as possible, even after Ctrl-C or an error in the collection.
def pytest_unconfigure() -> None:
    pool.close_all()
