"""``python -m minifsdp.learn``: ten functions of the package as exercises, graded by the specification.

::

    python -m minifsdp.learn list
    python -m minifsdp.learn start 6        writes exercise_06.py: the function without its body
    python -m minifsdp.learn hint 6         the next of three hints
    python -m minifsdp.learn check 6        runs the tests of the requirements that the function must meet

A check copies the repository to a temporary folder, and replaces the function in this copy. So the installed package
does not change. The package contains a solution of each exercise.
"""
