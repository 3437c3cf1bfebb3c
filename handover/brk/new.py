from spec_tests.mutants.catalogue.unseen import MUTANTS
NEW = "spec_tests/fsdp2/test_rare_groups.py spec_tests/fsdp1/test_rare_settings.py spec_tests/engine/test_memory_held.py spec_tests/checkpoint/test_frozen_resume.py"
FILES = {"NEW-08":0,"MP-12":1,"GRAD-02":0,"GRAD-04":0,"ORIG-13":1,"FWD-06 FS2-13":1,"OSD-08":3,"IGN-04":1,"FS2-MP-02":0,"FS2-EXT-02":0,"CLIP-01":1,"SUMMON-16":1,"NEW-04":0,"SHARD-06":2,"WIRE-10":2,"WIRE-09":2,"LEDGER-01":2,"ORDER-10":2,"SD-FULL-03":2}
M = [(m, NEW.split()[FILES[m.rows]]) for m in MUTANTS]
