"""Every fault of a rank at every stage of a training, and the reports of the other ranks.

`job` is a program that trains until its fault. `cells` runs it on several ranks and checks the survivors' reports.
``python -m spec_tools.faults`` runs all cells, prints a table and records it for the documentation.
"""
