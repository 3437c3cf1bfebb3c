source /tmp/venv/bin/activate; cd /tmp/wt/breaks; export PYTHONPATH=$PWD OMP_NUM_THREADS=1
