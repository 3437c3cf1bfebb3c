"""A message names the rank and the page with more information."""

from __future__ import annotations

import codecs
import os
import sys
import threading

import pytest
import torch.distributed as dist

from minifsdp.checks.place import way_out_of_main_thread
from minifsdp.engine.messages import message, rank_of_this_process
from spec_tests.harness import ranks
from spec_tests.waiting import comes_true


@ranks(2)
def test_a_message_begins_with_the_rank_and_ends_with_the_address() -> None:
    assert rank_of_this_process() == dist.get_rank()
    first, last = message("never-gathered", name="blocks.0").split("\n")
    assert first == f"rank {dist.get_rank()}: unit 'blocks.0' waits for an all-gather that was never issued"
    assert " troubleshoot.html#E-never-gathered, " in last
    assert last.endswith(" python -m minifsdp explain-error E-never-gathered")


@pytest.mark.pure
def test_without_a_process_group_a_message_names_rank_0() -> None:
    assert not dist.is_initialized()
    assert message("no-modules", call="fully_shard").startswith("rank 0: ")


@pytest.mark.spec("LEDGER-02")
@pytest.mark.pure
def test_program_that_reads_text_is_reported_at_its_own_line_and_not_inside_codecs() -> None:
    source, target = os.pipe()
    main = threading.main_thread().ident or 0
    found = []

    def look() -> None:
        comes_true(lambda: sys._current_frames()[main].f_globals["__name__"] == "codecs")
        found.append(way_out_of_main_thread())
        os.write(target, b"a text")
        os.close(target)

    thread = threading.Thread(target=look)
    with open(source, "rb") as file:
        thread.start()
        assert codecs.getreader("utf-8")(file).read() == "a text"
    thread.join()
    ((inside, code, _),) = found
    assert inside is not None and code is not None
    assert (inside.co_name, code.co_filename) == ("read", __file__)
