"""Every bug that tests.sim.mutants plants is found by a seed; without one, all those seeds are good."""

from __future__ import annotations

import pytest

from tests.sim.mutants import MUTANTS, Mutant, NativeTree, play_messenger_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # compilers on a busy machine


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> NativeTree:
    tree = NativeTree(tmp_path_factory.mktemp("mutants"))
    assert tree.play() == ""
    return tree


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.is_native], ids=lambda m: m.name)
def test_found_by_the_workers(tree: NativeTree, mutant: Mutant) -> None:
    assert tree.play_with(mutant) != ""


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if not m.is_native], ids=lambda m: m.name)
def test_found_by_the_messenger(mutant: Mutant) -> None:
    assert play_messenger_with(mutant) != ""
