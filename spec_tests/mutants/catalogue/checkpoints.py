from spec_tests.mutants.mutant import Mutant

MUTANTS: list[Mutant] = []
