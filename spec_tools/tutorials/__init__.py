"""Tests of the programs in ``tutorials/``: they run, and their output is correct."""
