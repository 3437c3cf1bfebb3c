"""Healthy programs that need their own processes: their starts and ends, stores, groups, signals and forks.

``spec_tests/healthy`` has the programs that run in the pool of ranks.
"""
