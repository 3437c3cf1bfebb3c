"""Two machines on one computer: two network namespaces, and a link between them with a limited rate and a delay.

``python -m spec_tools.two_machines COMMAND`` runs a command on both machines, see ``__main__.py``.
"""
