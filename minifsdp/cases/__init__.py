"""Cases: rare situations that a training step does not know.

A case is a program that needs more than the engine does, for example weights that are sent in 8 bits. Each module of
this folder is one case, except the three lists of cases and the helper ``output_nodes.py``. Its docstring has a program
that needs the case, what torch does, and the requirement.

The engine does not import this folder. It has *extension points*: the lists of ``engine/extension_points.py``, and
documented arguments and methods, which do nothing if there is no case. The front ends attach the cases:
``all_cases.py`` has the list for the step, ``of_fully_shard.py`` has the lists of ``fully_shard``, and
``added_methods.py`` has the cases that add methods to `FSDPModule`. Without the line of a case in the first two, only
the tests of this case fail: ``python -m spec_tools.breaks without-CASE`` shows it.
"""
