"""The forward: hooks, containers, evaluation, and nested units."""
