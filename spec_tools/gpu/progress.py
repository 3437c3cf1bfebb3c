"""The progress file: the finished chunks of this run and their outcomes.

The file is rewritten after each chunk. It is written under another name and then moved, so that it is complete even if
the kit is killed. It records the hardware, versions and code that its outcomes depend on. If one of these has changed,
the earlier outcomes are not valid any more, and the run starts from the beginning.

A chunk that was interrupted has no outcome, but its findings are in its folder. The report contains them until the
chunk has run again::

    suite/fsdp1/test_clip.py   passed, in progress.json
    bandwidth/8-ranks          Ctrl-C after the third size: three lines in bandwidth/8-ranks/findings.jsonl
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from spec_tools.gpu.chunks import FINDINGS_FILE, Outcome, read_findings

__all__ = ["InUse", "Progress", "outcomes_in"]

NAME = "progress.json"
STOPPED = "stopped"


class InUse(Exception):
    """Another kit is running in this folder."""


class Progress:
    """The outcomes of one run, by the names of the chunks.

    Args:
        folder: the folder of the run; created if it does not exist.
        holds_for: the facts that the outcomes depend on.

    Raises:
        InUse: another kit is running in the folder.
    """

    def __init__(self, folder: Path, holds_for: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / NAME
        # The lock belongs to the process, so it is released whenever the process ends.
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise InUse(f"Another kit is running in {folder}; let it end first.") from None
        self.holds_for = holds_for
        earlier = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.is_continued = earlier.get("holds_for") == holds_for
        self.outcomes = outcomes_in(folder) if self.is_continued else {}
        if not self.is_continued:
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
            self._write()

    def note(self, name: str, outcome: Outcome) -> None:
        """Stores the outcome of a finished chunk."""
        self.outcomes[name] = outcome
        self._write()

    def forget(self, stage: str) -> None:
        """Deletes the outcomes of this stage and of the control, so that their chunks run again."""
        gone = {stage, "control"}
        self.outcomes = {name: one for name, one in self.outcomes.items() if name.split("/")[0] not in gone}
        for name in gone:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self._write()

    def with_stopped(self) -> dict[str, Outcome]:
        """All outcomes, and the findings of interrupted chunks as outcomes with the word ``stopped``."""
        stopped = {}
        for path in sorted(self.folder.rglob(FINDINGS_FILE)):
            name = str(path.parent.relative_to(self.folder))
            found = [] if name in self.outcomes else read_findings(path)
            if found:
                stopped[name] = Outcome(STOPPED, 0.0, "the run was stopped here", findings=found)
        return self.outcomes | stopped

    def _write(self) -> None:
        outcomes = {name: outcome.as_json() for name, outcome in self.outcomes.items()}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"holds_for": self.holds_for, "outcomes": outcomes}))
        os.replace(new, self.path)

    def close(self) -> None:
        """Releases the folder for other kits."""
        self._lock.close()


def outcomes_in(folder: Path) -> dict[str, Outcome]:
    """The outcomes that the progress file of this folder contains; none if there is no file."""
    path = folder / NAME
    outcomes = json.loads(path.read_text())["outcomes"] if path.exists() else {}
    return {name: Outcome(**one) for name, one in outcomes.items()}
