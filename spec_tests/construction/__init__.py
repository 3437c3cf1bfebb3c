"""Constructors, their options, and initial weights."""
