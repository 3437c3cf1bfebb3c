"""The code that a test depends on, as a short digest: a result is *older* if the digest has changed since.

The code of a test is its file and all Python files of this repository that are no tests: the package, its transport
and its tools, the tutorials, and the helpers of the tests. So a changed helper makes the results of all tests older,
even of those that do not use it, and so does a changed comment. A changed test file only makes its own results older.
Data files and the version of torch do not count.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("minifsdp", "minifsdp_gloo", "minifsdp_tools", "spec_tests", "tutorials")


def digest_of(test: str) -> str:
    """The digest for a test, ``spec_tests/clipping/test_clip.py::test_norm[2]``; empty if its file has gone."""
    file = ROOT / test.partition("::")[0]
    if not file.is_file():
        return ""
    found = _of_common_code().copy()
    found.update(file.read_bytes())
    return str(found.hexdigest()[:16])


@cache
def _of_common_code() -> Any:
    paths = [ROOT / "conftest.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    found = hashlib.sha256()
    for path in sorted(path for path in paths if not path.name.startswith("test_")):
        found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found
