"""Calls, operators and collectives of a step."""
