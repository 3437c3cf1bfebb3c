"""Each page has a description of one sentence, of a length that search engines show. `test_site.py` compares all."""

import pytest


@pytest.mark.needs("mkdocs")
def test_long_description_is_cut_and_short_one_extended() -> None:
    from docs_build.pages.descriptions import LONGEST, fitted

    cut = fitted("word, " * 40, "More.")
    assert len(cut) <= LONGEST
    assert cut.endswith("word ...")
    assert fitted("Short", "More.") == "Short. More."
