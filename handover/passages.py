"""Run in the repository root: lists mutants, stream breaks and notes whose passages no longer match the package."""
import sys, pathlib; sys.path.insert(0,".")
from spec_tests.mutants.catalogue import EVERY
from spec_tests.mutants import mutant
bad=0
for m in EVERY:
    try: mutant.broken(m)
    except Exception as e: bad+=1; print("MUTANT", m.name, m.place, str(e)[:150])
from spec_tests.streams import breaks
from spec_tests.harness.passage import exchanged as _e
exchanged=lambda o:_e(pathlib.Path('minifsdp',o.file).read_text(),o.old,o.new,o.file)
for b in breaks.BREAKS.values():
    try: exchanged(b)
    except Exception as e: bad+=1; print("BREAK", getattr(b,"name",b), str(e)[:150])
import ast, pathlib
from docs_build.reading import notebook
for f in sorted(notebook.NOTES.rglob("*.md")):
    n=str(f.relative_to(notebook.NOTES).with_suffix(".py")); src=pathlib.Path("minifsdp",n)
    try:
        t=src.read_text(); notebook.place_notes(t, ast.parse(t), notebook.notes_of(n))
    except Exception as e: bad+=1; print("NOTE", n, str(e)[:200])
print(bad, "bad")
