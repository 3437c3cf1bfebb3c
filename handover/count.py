import sys, pathlib, io, tokenize, ast
def count(path):
    s=pathlib.Path(path).read_text(); doc=set()
    for n in ast.walk(ast.parse(s)):
        if isinstance(n,(ast.Module,ast.ClassDef,ast.FunctionDef,ast.AsyncFunctionDef)) and n.body and isinstance(n.body[0],ast.Expr) and isinstance(n.body[0].value,ast.Constant) and isinstance(n.body[0].value.value,str):
            doc.update(range(n.body[0].lineno,n.body[0].end_lineno+1))
    lines=set()
    for t in tokenize.generate_tokens(io.StringIO(s).readline):
        if t.type in (tokenize.COMMENT,tokenize.NL,tokenize.NEWLINE,tokenize.INDENT,tokenize.DEDENT,tokenize.ENDMARKER): continue
        lines.update(range(t.start[0],t.end[0]+1))
    return len(lines-doc)
tot={}
root=pathlib.Path(sys.argv[1] if len(sys.argv)>1 else "minifsdp")
for p in sorted(root.rglob("*.py")): tot[str(p)]=count(p)
from collections import Counter
d=Counter()
for p,n in tot.items(): d[str(pathlib.Path(p).parent)]+=n
for k,v in d.most_common(): print(v,k)
print(sum(tot.values()), len(tot))
for p,n in sorted(tot.items(), key=lambda x:-x[1]): print(n,p)
