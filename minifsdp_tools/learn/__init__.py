"""Exercises: write functions of the package, and check them with the requirements of the specification."""
