"""Small programs that show errors of torch's own FSDP. They do not need minifsdp.

The suite uses torch as its reference, and in a few cases the reference is wrong. Each case is a program in this folder
that needs only torch and two ranks. Its function ``main`` returns what the program says::

    torchrun --nproc-per-node 2 -m spec_tools.torch_is_wrong optimizer_moments
    torchrun --nproc-per-node 2 -m spec_tools.torch_is_wrong optimizer_moments minifsdp

The docstring describes the error and the correct behavior. It quotes two outputs of the program: with a version of
torch that has the error, and with minifsdp instead of torch. It names the first version that is right, if there is one.
The other versions in `CHECKED` are wrong in the same way. The page ``docs/torch-is-wrong.md`` is generated from
these docstrings, and ``test_torch_is_wrong.py`` checks both outputs. To check another version of torch, run::

    python -m spec_tools.torch_is_wrong

It runs all programs with the installed torch and prints which of them have the same output.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from packaging.version import Version

# The versions of torch with which all programs were run.
CHECKED = ("2.13.0", "2.14.1", "2.15.0")

TORCH, OURS = "torch.distributed.fsdp", "minifsdp"
FOLDER = Path(__file__).parent
DOCSTRING = re.compile(
    r"(?P<title>.+?)\.\n\n(?P<prose>.+)\n\n"
    r"With torch (?P<version>.+?)::\n\n(?P<in_torch>.+)\n\n"
    r"With minifsdp::\n\n(?P<in_minifsdp>.+)\n\n"
    r"Spec: (?P<rows>[A-Z0-9, -]+)\.(?: Ranks: (?P<num_ranks>\d)\.)?(?: Right since torch (?P<right_since>[\d.]+)\.)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Case:
    """A program and the facts from its docstring."""

    name: str
    title: str
    prose: str
    # A version of torch that has the error, and the first version that is right.
    version: str
    right_since: str | None
    in_torch: str
    in_minifsdp: str
    rows: tuple[str, ...]
    num_ranks: int
    # The program without its docstring.
    code: str

    @property
    def in_fixed_torch(self) -> str:
        """The output of a version of torch that is right."""
        return self.in_minifsdp

    def said_by(self, version: str) -> str:
        """The output with a version of torch. The error, for a version in `CHECKED` that is older than the fix."""
        is_fixed = self.right_since is not None and Version(version) >= Version(self.right_since)
        return self.in_torch if version in CHECKED and not is_fixed else self.in_fixed_torch

    def run(self, library: str) -> str:
        """The result of the program with ``library`` instead of torch, or its error message. All ranks call it."""
        text = (FOLDER / f"{self.name}.py").read_text(encoding="utf-8")
        text = re.sub(r"^from torch\.distributed\.fsdp\b", f"from {library}", text, flags=re.MULTILINE)
        names: dict[str, Any] = {"__name__": self.name}
        exec(compile(text, f"{self.name}.py", "exec"), names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return str(names["main"]())
            except Exception as error:
                return f"{type(error).__name__}: {error}".splitlines()[0]


def cases() -> list[Case]:
    """All programs of this folder, by name."""
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    return [_read(name) for name in names if not name.startswith(("__", "test_"))]


def _read(name: str) -> Case:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = DOCSTRING.fullmatch(ast.get_docstring(tree) or "")
    assert found, f"{name}: the docstring has another form"
    facts: dict[str, Any] = {key: dedent(value).strip() for key, value in found.groupdict().items() if value}
    facts["rows"] = tuple(facts["rows"].split(", "))
    facts["num_ranks"] = int(facts.get("num_ranks", 2))
    code = "\n".join(text.splitlines()[tree.body[0].end_lineno :]).strip()
    return Case(name=name, code=code, **{"right_since": None, **facts})


def is_said(expected: str, found: str) -> bool:
    """Whether the output is the expected one. If the expected text ends in "...", only the text before it is
    compared."""
    return found.startswith(expected[:-3]) if expected.endswith("...") else found == expected


def said_by_torchrun(case: Case) -> str:
    """Starts the program with torchrun; returns what rank 0 says, or the signal that ended it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-ranks-filter", "0"]
    command = [*launch, "--nproc-per-node", str(case.num_ranks), "-m", "spec_tools.torch_is_wrong", case.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=FOLDER.parents[1])
    if done.returncode == 0:
        return done.stdout.strip()
    # torchrun ends the remaining processes with signals of its own, and names the first cause last.
    signals = re.findall(r"Signal \d+ \(\w+\)", done.stderr)
    return (signals or [done.stderr])[-1]
