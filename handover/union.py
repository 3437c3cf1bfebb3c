import sys,re,subprocess
for f in sys.argv[1:]:
    s=open(f).read()
    s=re.sub(r"^<<<<<<< [^\n]*\n(.*?)^=======\n(.*?)^>>>>>>> [^\n]*\n",lambda m:m[1]+m[2],s,flags=re.M|re.S)
    open(f,'w').write(s); subprocess.run(["git","add",f])
