"""Older spellings, and names that frameworks look for."""
