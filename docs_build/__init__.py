"""Builds what the documentation shows but nobody wrote by hand.

The pages in ``docs/`` are prose. Whatever in them could go stale is asked for by a line in double braces and put in
here, while the site is built::

    {{ code engine/unit.py Unit.wait }}        the function as it is now, with a link to its page
    {{ timeline fsdp1-pre-4 | A caption. }}    a picture of a recorded run
    {{ simulated prefetch | A caption. }}      a picture of a step that was logged on the simulated accelerator
    {{ proof SHARD-04 PREF-02 }}               rows of the spec, their tests, and how these went last
    {{ sketch holdings | A caption. }}         a drawing of a learning page, its numbers computed
    {{ asset timeline | A caption. }}          a picture that is checked in
    {{ evidence }}                             the figures of the first page
    {{ wrong shared_streams }}                 a case in which torch is wrong, and its program
    {{ failure slow_rank }}                    a script of the failure lab, and what it has said
    {{ exercise zero_stage_3 }}                a question, and an answer that a function has computed

The rooms, from the bottom up:

``checked``      functions whose arguments are looked at first, as the API's page shows them
``generator``    what is needed of the generator that builds the site, and nothing else imports that
``order``        the reading order of the package's modules
``notebook``     notes on the code, kept beside it in ``notes/``
``tracing``      which statements only record
``source``       a module's text, cut into rows of prose and code
``markup``       the light markup of docstrings, as Markdown and as HTML
``codeblock``    the code of a row: numbers of lines, and what only records folded away
``breaks``       what turns red when a line is broken
``mentions``     which pages of Learn show a function
``asides``       both of these, below the prose of a row
``pages``        a module as a page, prose left and code right
``fragments``    one function, found by its name
``models``       the small models of the recorded runs
``record``       runs them on two and on four ranks, and writes what happened
``watching``     what of it is noted for the step player; ``torchside``, the same of torch's own FSDP
``recordings``   reads what was recorded, and ``arrivals`` when its data came
``pictures``     timelines
``results``      the rows of the spec and the last results of their tests
``badges``       what a row's proofs are worth: where, how, and what is open
``exercises``    questions whose answers are computed
``debugcost``    what the checks of ``minifsdp.debug()`` cost
``optimizers``   what a step of the optimizer and clipping cost
``values``       numbers and tables of the prose
``shardmaps``    who holds which elements
``sketch``       what drawings of the learning pages are made of; ``sketches`` finds one by its name
``holdings``     who holds what under the stages of ZeRO; ``oneweight``, one weight from its cut to its gradient
``linkbytes``    what a step sends within machines and between them
``hooksteps``    one unit after each of its four hooks, as recorded
``messages``     every message of the package; ``troubles`` makes entries of them
``paste``        the box that knows messages again: what it looks for
``myths``        wrong claims, what is true, and the tests that show it
``player``       recorded runs as scripts for the step player; ``running``, the lines that ran
``specpage``     the page of the spec
``streams``      what is shown of streams: pictures of logged steps, broken engines, what collides in torch
``failures``     the scripts of the failure lab, and what they say
``wrong``        cases in which torch is wrong
``verbs``        the table of verbs and layouts; the way of one parameter through a training step
``glossary``     the glossary's words on other pages
``descriptions`` a sentence about each page
``searching``    what the search knows of a page
``evidence``     figures of the first page, computed from the records
``directives``   the lines in double braces
``lessons``      runs the tutorials and records what they say; ``busy`` tells what others did meanwhile
``lessonpage``   a tutorial as a page, and the index of all
``links``        follows every link of the built site
``hook``         what mkdocs calls
"""
