"""The progress file: the finished chunks of this run and their outcomes.

The file is rewritten after each chunk. It is written under another name and then moved, so that it is complete even if
the kit is killed. It records the hardware, versions and code that its outcomes depend on. If one of these has changed,
the earlier outcomes are not valid any more, and the run starts from the beginning.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from spec_tools.gpu.chunks import Outcome

__all__ = ["InUse", "Progress"]


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
        self.path = folder / "progress.json"
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
        self.outcomes = {name: Outcome(**one) for name, one in earlier["outcomes"].items()} if self.is_continued else {}

    def note(self, name: str, outcome: Outcome) -> None:
        """Stores the outcome of a finished chunk."""
        self.outcomes[name] = outcome
        self._write()

    def forget(self, stage: str) -> None:
        """Deletes the outcomes of this stage, so that its chunks run again."""
        self.outcomes = {name: one for name, one in self.outcomes.items() if name.split("/")[0] != stage}
        self._write()

    def _write(self) -> None:
        outcomes = {name: outcome.as_json() for name, outcome in self.outcomes.items()}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"holds_for": self.holds_for, "outcomes": outcomes}))
        os.replace(new, self.path)

    def close(self) -> None:
        """Releases the folder for other kits."""
        self._lock.close()
