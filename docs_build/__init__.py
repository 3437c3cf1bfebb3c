"""Builds the generated parts of the documentation.

The pages in ``docs/`` are prose. Everything in them that could become outdated is a directive, a line in double braces,
which is replaced while the site is built::

    {{ code engine/unit.py Unit.wait }}        the current source of the function, with a link to its page
    {{ timeline fsdp1-pre-4 | A caption. }}    a picture of a recorded run
    {{ simulated prefetch | A caption. }}      a picture of a step that was logged on the simulated accelerator
    {{ proof SHARD-04 PREF-02 }}               requirements, their tests, and the last results of these
    {{ sketch holdings | A caption. }}         a drawing of a learning page, with computed numbers
    {{ asset timeline | A caption. }}          a picture from the repository
    {{ evidence }}                             the figures of the first page
    {{ wrong shared_streams }}                 a case in which torch is wrong, and its program
    {{ failure slow_rank }}                    a script of the failure lab, and its output
    {{ exercise zero_stage_3 }}                a question, and a computed answer

The modules, from the lowest import layer to the highest:

``generator``    the interface to the site generator, which only this module imports
``order``        the reading order of the package's modules
``notebook``     notes on the code, stored separately in ``notes/``
``tracing``      the statements that only record
``source``       a module's text, split into rows of prose and code
``markup``       the light markup of docstrings, as Markdown and as HTML
``codeblock``    the code of a row, with line numbers, and recording statements folded
``breaks``       the tests that fail when a line is broken
``mentions``     the pages of Learn that show a function
``asides``       both of these, below the prose of a row
``pages``        a module as a page, prose left and code right
``fragments``    one function, found by its name
``models``       the small models of the recorded runs
``record``       runs them on two and on four ranks, and records their events
``watching``     the state recorded for the step player; ``torchside``, the same for torch's own FSDP
``recordings``   reads the records; ``arrivals``, the times at which data arrived
``pictures``     timelines
``results``      the requirements and the last results of their tests
``badges``       labels for a requirement: where and how it was tested, and what is open
``exercises``    questions with computed answers
``debugcost``    the cost of the checks of ``minifsdp.debug()``
``optimizers``   the cost of an optimizer step and of clipping
``values``       numbers and tables of the prose
``shardmaps``    the elements that each rank holds
``sketch``       the elements of drawings on the learning pages; ``sketches`` finds one by its name
``holdings``     the memory of each rank under the stages of ZeRO; ``oneweight``, one weight from sharding to gradient
``linkbytes``    the bytes that a step sends within machines and between them
``hooksteps``    one unit after each of its four hooks, as recorded
``messages``     every message of the package; ``troubles`` makes entries of them
``paste``        the box that recognises pasted messages: its search patterns
``myths``        wrong claims, the correct statements, and the tests that show them
``player``       recorded runs as scripts for the step player; ``running``, the lines that ran
``specpage``     the page of the spec
``streams``      logged steps on streams as pictures, broken engines, and races in torch
``failures``     the scripts of the failure lab, and their output
``wrong``        cases in which torch is wrong
``verbs``        the table of verbs and layouts; the path of one parameter through a training step
``glossary``     the terms of the glossary on other pages
``descriptions`` a sentence about each page
``searching``    the search index of a page
``evidence``     figures of the first page, computed from the records
``directives``   the lines in double braces
``lessons``      runs the tutorials and records their output; ``busy`` measures the load of other programs
``lessonpage``   a tutorial as a page, and the index of all
``links``        follows every link of the built site
``hook``         the hooks of mkdocs
"""
