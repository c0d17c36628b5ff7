"""What `pdd check --peer` says of a node that does not run yet is what the node would say."""

from __future__ import annotations

import pytest

from pdd.config_load import load
from pdd.doctor.peer import local_node
from pdd.messenger import versions


@pytest.mark.parametrize("dp", [1, 2])
def test_a_decoder_of_several_groups_asks_for_a_prefiller_that_knows_them(dp: int) -> None:
    config, _ = load(assignments=["node.role=both", f"engine.dp={dp}"], demo=True, search=False, env={})
    node = local_node(config)
    assert (node.versions, node.geometry.groups) == (versions.of_decoder(dp), dp)
