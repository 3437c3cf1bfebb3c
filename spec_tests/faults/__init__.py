"""Every fault of a rank at every stage of a training, and what the other ranks say then.

`job` is the program that trains until its fault, `cells` runs it on ranks and judges what the survivors said, and
``python -m spec_tests.faults`` runs all cells, prints them as a table and keeps it for the documentation.
"""
