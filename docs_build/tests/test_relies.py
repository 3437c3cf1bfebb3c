"""The page "What minifsdp relies on" lists exactly the private names of torch that the code uses."""

import pytest

from docs_build.tests import private_names
from spec_tests.harness.accounting import ROOT

pytestmark = [pytest.mark.pure, pytest.mark.spec("START-10"), pytest.mark.proof("text")]

PAGE = ROOT / "docs" / "relies.md"
# The numbers may only become smaller: of names that training uses, and of those that only the tools use.
MOST, MOST_OF_TOOLS = 48, 10
TOOLS = "minifsdp_tools/"


def test_the_page_lists_the_private_names_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8").partition("| name |")[1:] != ("", "")
    assert "| name |" + PAGE.read_text(encoding="utf-8").partition("| name |")[2].rstrip("\n") == private_names.table()


def test_the_number_of_private_names_does_not_grow() -> None:
    users = private_names.private_names().values()
    of_tools = sum(all(module.startswith(TOOLS) for module in modules) for modules in users)
    assert of_tools <= MOST_OF_TOOLS
    assert len(users) - of_tools <= MOST
