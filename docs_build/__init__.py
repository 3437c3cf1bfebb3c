"""Builds the generated parts of the documentation.

The pages in ``docs/`` are prose. Everything in them that could become outdated is a directive, a line in double braces,
which is replaced while the site is built::

    {{ code engine/unit.py Unit.wait }}        the current source of the function, with a link to its page
    {{ timeline fsdp1-pre-4 | A caption. }}    a picture of a recorded run
    {{ timeline x | focus=AG B | A caption. }} the same; everything except all-gathers and backward is pale
    {{ simulated prefetch | A caption. }}      a picture of a step that was logged on the simulated accelerator
    {{ proof SHARD-04 PREF-02 }}               requirements, their tests, and the last results of the tests
    {{ sketch holdings | A caption. }}         a drawing of a learning page, with computed numbers
    {{ asset timeline | A caption. }}          a picture from the repository
    {{ table large }}                          a table, a macro of ``pages/tables.md.jinja``
    {{ value num-mutants }}                    a number
    {{ wrong shared_streams }}                 a case in which torch is wrong, and its program
    {{ failure slow_rank }}                    a script of the failure lab, and its output
    {{ exercise zero_stage_3 }}                a question, and its answer

``pages/directives.py`` contains all directives. These are the folders, from the lowest import layer to the highest; a
module does not import modules of a higher layer:

``reading``      the source of the package: the reading order, modules as rows of prose and code, notes, messages,
                 docstrings as HTML, the tests that fail when a line is broken
``recording``    runs small trainings, tutorials and the failure lab, and reads the records of these and of the tests
``drawing``      timelines, and the drawings of the learning pages
``pages``        pages and parts of pages

``templates`` loads the templates (``*.jinja``) of pictures and pages, and ``hook`` has the hooks that mkdocs calls.
"""
