"""The link checker must find broken links; otherwise a successful build means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_build.pages.links import problems

BROKEN = {
    '<a href="sub/c.html">': "a.html links to sub/c.html: no such file",
    '<a href="sub/b.html#gone">': "a.html links to sub/b.html#gone: no anchor 'gone'",
    '<script src="https://cdn.example/x.js">': "a.html loads https://cdn.example/x.js",
    '<link rel="stylesheet" href="//fonts.example/f">': "a.html loads //fonts.example/f",
}
VALID = '<p id="own"><a href="sub/b.html#here"></a><a href="#own"></a><a href="https://example.org/x"></a>'


@pytest.mark.parametrize("tag", BROKEN)
def test_broken_links_and_loads_from_other_hosts_are_named_with_their_page(tmp_path: Path, tag: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text('<h2 id="here">B</h2>')
    (tmp_path / "a.html").write_text(VALID + tag)
    assert list(problems(tmp_path)) == [BROKEN[tag]]
