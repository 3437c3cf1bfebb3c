"""Long tests of the generator of random programs, ``spec_tests/random_programs``."""
