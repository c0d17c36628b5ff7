"""The bugs of tests.sim.mutants can still be planted, and one is found; `make sim-mutants` sees that all are."""

from __future__ import annotations

import pytest

from tests.sim import mutants
from tests.sim.mutants import MUTANTS, REPOSITORY, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_can_be_planted(mutant: Mutant) -> None:
    source = (REPOSITORY / mutant.path).read_text()
    planted = mutant.plant(source)
    assert planted != source
    assert not mutant.is_native or mutant.path.endswith(".cpp")  # a header would have all built again
    if not mutant.is_native:
        compile(planted, mutant.path, "exec")


def test_a_planted_bug_is_found() -> None:
    assert mutants.main(["missing tombstone"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)  # compilers on a busy machine
def test_all_are_found() -> None:
    assert mutants.main([]) == 0
