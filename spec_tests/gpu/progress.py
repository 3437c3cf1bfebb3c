"""What is on the disk: which chunks of this run are done, and how they went.

The file is written anew after each chunk, beside its place and then moved, so that whatever ends the kit leaves a
whole one. It says for which hardware, versions and code it holds. Where one of these has changed, what was done before
proves nothing any more, and the run begins anew.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from spec_tests.gpu.chunks import Outcome

__all__ = ["InUse", "Progress"]


class InUse(Exception):
    """Another kit is running in this folder."""


class Progress:
    """The outcomes of one run, by the names of the chunks.

    Args:
        folder: the run's own; made if it is not there.
        holds_for: what the outcomes depend on.

    Raises:
        InUse: somebody else has it.
    """

    def __init__(self, folder: Path, holds_for: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "progress.json"
        # Held by the process: however that ends, the lock is gone with it.
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
        """A chunk is done."""
        self.outcomes[name] = outcome
        self._write()

    def forget(self, stage: str) -> None:
        """The chunks of this stage are to be run again."""
        self.outcomes = {name: one for name, one in self.outcomes.items() if name.split("/")[0] != stage}
        self._write()

    def _write(self) -> None:
        outcomes = {name: outcome.as_json() for name, outcome in self.outcomes.items()}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"holds_for": self.holds_for, "outcomes": outcomes}))
        os.replace(new, self.path)

    def close(self) -> None:
        """Lets another kit have the folder."""
        self._lock.close()
