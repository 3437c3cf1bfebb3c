"""The reading order: FSDP2 and FSDP1 first, then every other module, each once.

A module is named by its path inside the package: ``engine/unit.py``. Tutorials have the same kind of page and are named
by their path in the repository: ``tutorials/overlap.py``, and so are the modules of the other packages:
``minifsdp_tools/cost.py``. The sections are in ``order.toml``.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "minifsdp"
BESIDE = (ROOT / "minifsdp_gloo", ROOT / "minifsdp_tools")
SECTIONS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["section"]


def path_of(name: str) -> Path:
    """The path of the file with that name."""
    return (ROOT if name.startswith(("tutorials/", "minifsdp_gloo/", "minifsdp_tools/")) else PACKAGE) / name


def name_of(path: Path) -> str:
    """The name of the module in that file."""
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


def all_modules() -> list[str]:
    """Every module of all packages, sorted by name."""
    return sorted(name_of(path) for package in (PACKAGE, *BESIDE) for path in package.rglob("*.py"))


def reading_order() -> list[tuple[str, str, list[str]]]:
    """Title, sentence and modules of each section; all other modules are added to the last section of their folder."""
    existing = all_modules()
    sections = [(one["title"], one["about"], [n for n in one["modules"] if n in existing]) for one in SECTIONS]
    named = {name for _, _, names in sections for name in names}
    # Modules that only re-export names, and modules outside of all folders, come last.
    last = {name.rpartition("/")[0]: number for number, one in enumerate(SECTIONS) for name in one["modules"]}
    for name in existing:
        if name not in named:
            folder = "" if name.endswith("__init__.py") else name.rpartition("/")[0]
            sections[last[folder]][2].append(name)
    return sections
