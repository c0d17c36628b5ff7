"""The daemon's side of a rank with GPU memory: starts one, takes its memory, prints what it found as JSON."""

from __future__ import annotations

import json
import logging
import sys

from pdd.config import Config, Fabric, Node
from pdd.daemon.kv_fabric import KvFabric
from pdd.engine.executor import RankExecutor
from pdd.engine.rank_protocol import RankInit
from pdd.errors import PddError
from pdd.topology import machine
from pdd.topology.placement import Wanted, plan_placement
from tests.gpu.cuda import Cuda
from tests.gpu.gpu_rank import PATTERN


def main(page_size: int) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pdd.fabric").addHandler(handler)
    logging.getLogger("pdd.fabric").setLevel(logging.INFO)
    config = Config(node=Node(name="gpu", role="both"), fabric=Fabric(provider="tcp"))
    fabric = KvFabric(config, plan_placement(machine.read(), Wanted()), {}, device="cuda")
    executor = RankExecutor(
        RankInit(model_dir="", page_size=page_size), step_timeout=20,
        command=lambda fd: [sys.executable, "-m", "tests.gpu.gpu_rank", str(fd)],
    )
    ranks = executor.start()
    try:
        fabric.take_memory(ranks)
        memory = fabric._memory[0]
        found = {
            "bytes": Cuda().read(memory.address, len(PATTERN)).decode(), "regions": list(fabric.regions),
            "kind": ranks[0].ready.kv_kind, "device": ranks[0].ready.kv_device,
        }
    except PddError as error:
        found = {"error": str(error), "hint": error.hint}
    finally:
        fabric.close()
        executor.close()
    print(json.dumps({**found, "log": lines}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
