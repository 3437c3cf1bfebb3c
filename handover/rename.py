import re,subprocess,pathlib
m=dict(l.split("\t") for l in open("/tmp/rename.tsv").read().strip().split("\n"))
files=[f for f in subprocess.run(["git","ls-files"],capture_output=True,text=True).stdout.split("\n") if re.search(r"\.(py|md|toml|json|yml)$",f) and f!="CHANGELOG.md"]
r=re.compile(r"\btest_\w+")
for f in files:
    p=pathlib.Path(f); s=p.read_text(encoding="utf-8"); t=r.sub(lambda x:m.get(x[0],x[0]),s)
    if t!=s: p.write_text(t,encoding="utf-8")
subprocess.run("ruff format -q .",shell=True)
