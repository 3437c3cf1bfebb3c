"""run.py FILE [names...]: runs each break against its tests; prints NOTICED or NOT."""
import sys, subprocess, shutil, pathlib, tempfile, os, importlib.util, time, contextlib
sys.path.insert(0, os.getcwd())
from spec_tests.mutants.mutant import broken
from spec_tests.mutants.runner import _copy
spec = importlib.util.spec_from_file_location("m", sys.argv[1]); m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
names = sys.argv[2:]
for mutant, args in m.M:
    if names and not any(n in mutant.name for n in names): continue
    t = time.time()
    try:
        change = broken(mutant)
    except ValueError as e:
        print("BAD", mutant.name, e, flush=True); continue
    with _copy(change) as folder:
        env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        extra = ["--device", mutant.device] if mutant.device != "cpu" else []
        try:
            p = subprocess.run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *extra, *__import__("shlex").split(args)], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
            out = p.stdout; code = p.returncode
        except subprocess.TimeoutExpired as e:
            code = "timeout"; out = (e.stdout or b"").decode()[-300:]
    last = [l for l in out.splitlines() if l.startswith(("FAILED", "ERROR"))][:1]
    tail = out.strip().splitlines()[-1:] 
    print(("NOTICED " if code in (1, "timeout") else "NOT     " if code == 0 else f"??{code} "), mutant.name, f"{time.time()-t:.0f}s", (last or tail)[:1], flush=True)
