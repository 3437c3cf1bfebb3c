"""Tests of the programs in ``tutorials/``: that what a visitor runs first works, and says what is true."""
