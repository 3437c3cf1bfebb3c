"""Tests of older spellings and of names that frameworks use."""
