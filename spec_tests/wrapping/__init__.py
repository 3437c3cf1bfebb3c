"""Policies that choose the modules to wrap."""
