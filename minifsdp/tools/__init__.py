"""Counting and drawing: what a job will cost, and what happened when."""
