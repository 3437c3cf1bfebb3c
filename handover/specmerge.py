"""Resolve docs/spec.md conflicts that append PROG/AGREE sections: keep all rows, one heading per section, sorted by ID."""
import re,subprocess
p='docs/spec.md'; s=open(p).read()
parts=re.split(r"^<<<<<<< .*\n|^=======\n|^>>>>>>> .*\n",s,flags=re.M)
text="".join(parts)
# gather sections at the end
i=min(x for x in (text.find("\n## PROG:"),text.find("\n## AGREE:")) if x>=0)
head,tail=text[:i].rstrip("\n")+"\n",text[i:]
rows=sorted(set(re.findall(r"^\| (?:PROG|AGREE)-\d+ \|.*$",tail,re.M)))
intro={k:"" for k in ("PROG","AGREE")}
for k in intro:
    best=""
    for m in re.finditer(rf"^## {k}:.*\n((?:(?!\||## ).*\n)*)",tail,re.M):
        t=m[1].strip()
        if t and t not in best: best=(best+"\n\n"+t).strip()
    intro[k]=best
title={"PROG":"other people's programs","AGREE":"ranks that differ"}
out=head
for k in ("PROG","AGREE"):
    r=[x for x in rows if x.startswith(f"| {k}-")]
    if r: out+=f"\n## {k}: {title[k]}\n\n"+(intro[k]+"\n\n" if intro[k] else "")+"| ID | requirement | test | source |\n|---|---|---|---|\n"+"\n".join(r)+"\n"
open(p,'w').write(out); print(len(rows)); subprocess.run("git add docs/spec.md",shell=True)
