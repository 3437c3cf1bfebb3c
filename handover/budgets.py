import re
from pathlib import Path
import spec_tests.test_house_rules as h
p=Path("spec_tests/test_house_rules.py"); t=p.read_text()
special={"story":h.story(),"house":[m for m in h.MODULES if not m.startswith(h.APART)],h.TOOLS:[m for m in h.MODULES if m.startswith(h.TOOLS) and not m.startswith(h.EXPLAIN)]}
names={"house":'"house"',"story":'"story"',h.TRANSPORT:"TRANSPORT",h.DEBUGGING:"DEBUGGING",h.ARGUMENTS:"ARGUMENTS",h.WATCHDOG:"WATCHDOG",h.TOOLS:"TOOLS",h.COMMAND:"COMMAND",h.EXPLAIN:"EXPLAIN"}
for room,limit in h.BUDGETS.items():
    mods=special.get(room,[m for m in h.MODULES if m.startswith(room)])
    n=sum(map(h.num_code_lines,mods)); key=names.get(room,f'"{room}"')
    if n!=limit: print(room,limit,n)
    t=re.sub(rf"(\n    {re.escape(key)}: )\d+,",rf"\g<1>{n},",t)
imported=[m for m in h.imported_for("fsdp2/fully_shard.py") if not m.startswith((h.TRANSPORT,h.WATCHDOG,"ledger"))]
n=sum(map(h.num_code_lines,imported)); print("FULLY",n); t=re.sub(r"FULLY_SHARD = \d+",f"FULLY_SHARD = {n}",t)
for f,l in h.LONGER.items():
    n=len(h.text_of(f).splitlines())
    t=re.sub(rf'(\n    "{re.escape(f)}": )\d+,',rf"\g<1>{n},",t) if n>300 else re.sub(rf'\n    "{re.escape(f)}": \d+,',"",t)
p.write_text(t)
