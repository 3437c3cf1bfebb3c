import sys
from concurrent.futures import ThreadPoolExecutor
from spec_tests.streams import engines
from spec_tests.streams.breaks import BREAKS
def main():
  intact={}
  for name in sys.argv[1:]:
      one=BREAKS[name]
      try:
          if one.program not in intact: intact[one.program]=engines.run(one.program, num_schedules=4)
          o=intact[one.program]
          if o.error or o.races or o.different: print("INTACT", one.program, o.error, o.races[:1], o.different[:1])
          with engines.broken(one) as folder: found=engines.findings(engines.run(one.program, folder), o)
          print("FOUND" if one.by in found else "NOT FOUND", name, {k:str(v)[:150] for k,v in found.items()}, flush=True)
      except Exception as e: print("ERR", name, repr(e)[:300], flush=True)
if __name__=='__main__': main()