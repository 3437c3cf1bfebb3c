"""Counting and drawing."""
