"""Checks that observe a run: ranks that differ, the log of collectives, and the watchdog."""
