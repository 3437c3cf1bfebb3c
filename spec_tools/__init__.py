"""Tools that check the tests and run for long: breaks on purpose, faults, random programs, benchmarks, the GPU kit."""
