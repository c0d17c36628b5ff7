"""`pdd bench kv` beside what else moves pages, all in one run on one machine: NIXL, Mooncake, raw TCP, libfabric, CMA, memcpy.

    python tests/bench/bench_kv.py [--peers DIR] [--bare BUILD/tests/native/bare_loop] [--sizes ...] [--json OUT]

Every contender moves the same requests of 64 pages between two processes over loopback, scattered and adjacent, 16 at
a time, over a pool of 256 MiB: pdd by the library of `pdd bench kv`, NIXL with one notification a request, Mooncake in batches.
Raw TCP, libfabric's bare write loop, process_vm_writev and memcpy (from `make native-test`) move the pool once a turn.
Contenders take turns; a ratio is the median, over the turns, of two rates of one turn. `tools/peers.sh DIR kv` installs NIXL
and Mooncake; who is missing is left out, and so are the bounds on them. What arrived is compared page by page: pdd's
after every turn, the peers' after the last.

Latency: from the counter's move in one process to the last immediate seen in the other, against the bare loop's time for the
same 64 pages; and from the move to the first post (`post_latency`, spinning). A cell, or latencies, during which others were busy judge
nothing, as in bench_fabric.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fabric"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_fabric import FOREIGN, Bare, cpu_seconds
from bench_local import Copy
from common import median, percentile, report
from fabric_node import PAGE, spawn

from pdd.bench import cells, run
from pdd.bench.cells import Cell
from pdd.bench.node import FabricOptions
from pdd.bench.reader import Reader
from pdd.fabric import _native as native

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/native-tests/tests/native"
BIND = "127.0.0.1"
WINDOW = 64
DEPTH = 16  # requests at once
Bounds = list[tuple[str, float, str, float]]


class Contender(Protocol):
    name: str

    def take(self, cell: Cell) -> None:
        """What comes next."""

    def turn(self, seconds: float) -> float:
        """Bytes per second of one turn, about so long."""

    def settle(self) -> None:
        """After the last turn of a cell."""

    def pids(self) -> list[int]:
        """Of its processes, but for this one."""


class Pdd:
    def __init__(self, reader: Reader, name: str) -> None:
        self.reader, self.name = reader, name
        self.cores: list[tuple[float, float]] = []  # of this cell: writer, reader

    def take(self, cell: Cell) -> None:
        self.cell, self.cores = cell, []
        self.reader.take(cell)

    def turn(self, seconds: float) -> float:
        sample = self.reader.measure(seconds)
        self.cores.append((sample.writer_cores, sample.reader_cores))
        return sample.requests * self.cell.request_bytes / sample.seconds

    def settle(self) -> None:
        return

    def pids(self) -> list[int]:
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


class Peer:
    """Two processes of peers/kv_NAME.py, under the Python of the venv where tools/peers.sh put NAME."""

    def __init__(self, name: str, venv: Path, environment: dict[str, str]) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        command = [venv / "bin/python", ROOT / "tests/bench/peers" / f"kv_{name}.py", str(cells.POOL_BYTES)]
        env = {**os.environ, **environment}
        self.ends = [subprocess.Popen(command, **pipes, env=env, text=True) for _ in range(2)]
        self.sender, self.receiver = self.ends
        self.name, _ = (self._answer(end)["name"] for end in self.ends)
        self._call(self.sender, "fill", 1)
        for end, other in (self.ends, reversed(self.ends)):
            self._call(end, "connect", self._call(other, "describe"))

    def take(self, cell: Cell) -> None:
        self.cell, self.most = cell, 0
        self.sources = cells.order(cell.num_pages, cell.layout, 1).tolist()
        self.targets = cells.order(cell.num_pages, cell.layout, 2).tolist()
        self._call(self.receiver, "fill", 0)
        self._call(self.sender, "prepare", cell.page_bytes, cell.pages, self.sources, self.targets, cell.depth)

    def turn(self, seconds: float) -> float:
        self._tell(self.receiver, "receive")
        began, ended, requests = self._call(self.sender, "send", seconds)
        arrived = self._answer(self.receiver)
        self.most = max(self.most, requests)
        return requests * self.cell.request_bytes / ((arrived or ended) - began)

    def settle(self) -> None:
        count = min(self.most, self.cell.num_slots) * self.cell.pages
        size = self.cell.page_bytes
        sent = self._call(self.sender, "checksums", size, self.sources[:count])
        if sent != self._call(self.receiver, "checksums", size, self.targets[:count]):
            raise RuntimeError(f"{self.name}: what arrived is not what was sent")

    def pids(self) -> list[int]:
        return [end.pid for end in self.ends]

    def _tell(self, end: subprocess.Popen[str], *call: Any) -> None:
        print(json.dumps(call), file=end.stdin, flush=True)

    def _answer(self, end: subprocess.Popen[str]) -> Any:
        line = end.stdout.readline()
        if not line:
            raise RuntimeError(f"{end.args[1]} ended with {end.wait()}")
        return json.loads(line)

    def _call(self, end: subprocess.Popen[str], *call: Any) -> Any:
        self._tell(end, *call)
        return self._answer(end)

    def close(self) -> None:
        for end in self.ends:
            end.stdin.close()
            try:
                end.wait(5)
            except subprocess.TimeoutExpired:  # it still waits for the other end
                end.kill()
                end.wait()
            end.stdout.close()


class Yardstick:
    """A role of bare_loop or copy_loop, started anew for each cell."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.running: Bare | None = None

    def take(self, cell: Cell) -> None:
        self.close()
        self.cell = cell
        self.running = yardstick(self.name, self.args, cell.num_pages, cell.page_bytes, cell.layout)
        self.running.round()  # connects

    def turn(self, seconds: float) -> float:
        assert self.running is not None
        return self.cell.pool_bytes / self.running.round()

    def settle(self) -> None:
        self.close()

    def pids(self) -> list[int]:
        return self.running.pids() if self.running else []

    def close(self) -> None:
        if self.running:
            self.running.close()
            self.running = None


def yardstick(name: str, args: argparse.Namespace, pages: int, page_bytes: int, layout: str) -> Bare:
    job = [str(pages), str(page_bytes), layout, str(WINDOW)]
    fabric = [args.library, args.provider, BIND]
    if name == "libfabric":
        return Bare(name, args.bare, ["fabric-recv", *fabric], ["fabric-send", *fabric], job)
    if name == "raw TCP":
        return Bare(name, args.bare, ["tcp-recv", BIND], ["tcp-send", BIND], job)
    if name == "process_vm_writev":
        return Bare(name, args.copy, ["writev-recv"], ["writev-send"], job)
    return Copy(args.copy, job)


PEERS = {
    "NIXL tcp": ("nixl", {"UCX_TLS": "tcp"}),
    "NIXL cma": ("nixl", {"UCX_TLS": "posix,sysv,cma,self,tcp"}),
    "Mooncake": ("mooncake", {}),
}
YARDSTICKS = ("libfabric", "raw TCP", "process_vm_writev", "memcpy")


@contextmanager
def contenders(args: argparse.Namespace, plan: tuple[Cell, ...]) -> Iterator[dict[str, Any]]:
    """By short name. pdd is there once per provider."""
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for provider in args.providers.split(","):
            options = FabricOptions(provider=provider, library=args.library)
            name = f"pdd {provider}"
            found[name] = Pdd(stack.enter_context(run.loopback(options, plan, 30.0)), name)
        for name, (script, environment) in PEERS.items():
            venv = args.peers / script
            if name not in args.without and (venv / ".done").exists():
                found[name] = Peer(script, venv, environment)
                stack.callback(found[name].close)
            else:
                print(f"without {name}; to get it: tools/peers.sh {args.peers} kv", file=sys.stderr)
        for name in YARDSTICKS:
            if args.bare and args.copy and name not in args.without:
                found[name] = Yardstick(name, args)
                stack.callback(found[name].close)
        yield found


def measure_rates(args: argparse.Namespace, rows: list[dict[str, Any]], bounds: Bounds) -> list[str]:
    """Returns the cells that are void, because others used the processor meanwhile."""
    plan = cells.parse(args.sizes, "64", args.layout, DEPTH)
    void: list[str] = []
    with contenders(args, plan) as found:
        for cell in plan:
            for contender in found.values():
                contender.take(cell)
                contender.turn(0.0)  # connects and touches memory
            rates: dict[str, list[float]] = {name: [] for name in found}
            pids = sorted({os.getpid(), *(pid for contender in found.values() for pid in contender.pids())})
            start, (everyone, ours) = time.perf_counter(), cpu_seconds(pids)
            for _ in range(args.turns):
                for name, contender in found.items():
                    rates[name].append(contender.turn(args.seconds))
            everyone_now, ours_now = cpu_seconds(pids)
            foreign = ((everyone_now - everyone) - (ours_now - ours)) / (time.perf_counter() - start)
            for contender in found.values():
                contender.settle()
            rows.append(rates_row(cell, found, rates, foreign))
            print(f"  {cell.name}: {rows[-1]}", file=sys.stderr)
            if foreign > FOREIGN:
                void.append(f"{cell.name}: others used {foreign:.2f} cores")
                continue
            judge(cell, rates, bounds)
            for contender in found.values():
                if isinstance(contender, Pdd):
                    cores = max(median(list(end)) for end in zip(*contender.cores, strict=True))
                    bounds.append((f"{cell.name}: cores of the busier end of {contender.name}", cores, "<=", 1.0))
    return void


def rates_row(cell: Cell, found: dict[str, Any], rates: dict[str, list[float]], foreign: float) -> dict[str, Any]:
    row: dict[str, Any] = {"cell": cell.name}
    row |= {f"{name} GB/s": median(each) / 1e9 for name, each in rates.items()}
    for contender in found.values():
        if isinstance(contender, Pdd):
            row[f"{contender.name} cores"] = "+".join(f"{median(list(end)):.2f}"
                                                      for end in zip(*contender.cores, strict=True))  # fmt: skip
    return {**row, "foreign": foreign}


def judge(cell: Cell, rates: dict[str, list[float]], bounds: Bounds) -> None:
    def bound(name: str, least: float, ours: str = "pdd tcp") -> None:
        if name in rates and ours in rates:
            over = median([mine / theirs for mine, theirs in zip(rates[ours], rates[name], strict=True)])
            bounds.append((f"{cell.name}: {ours} of {name}", over, ">=", least))

    if cell.page_bytes >= 1 << 20:
        bound("NIXL tcp", 0.95)
        bound("Mooncake", 0.95)
    elif cell.layout == "adjacent":
        bound("NIXL tcp", 1.0)
    else:
        bound("NIXL tcp", {4096: 1.5, 16384: 1.3, 65536: 1.3}.get(cell.page_bytes, 1.0))
        bound("Mooncake", 2.0)
        if cell.page_bytes <= 64 << 10:
            bound("NIXL cma", 1.5 if cell.page_bytes == 4096 else 1.2, "pdd local")
    if cell.page_bytes >= 64 << 10:
        bound("memcpy", 0.85, "pdd local")


def measure_latency(args: argparse.Namespace, rows: list[dict[str, Any]], bounds: Bounds) -> None:
    """A layer of 64 scattered pages of 16 KiB, in turns with the bare loop's same pages."""
    count, per_page = 64, 4
    reader = spawn(args.library, args.provider, [BIND], count * per_page)
    writer = spawn(args.library, args.provider, [BIND], count * per_page)
    bare = yardstick("libfabric", args, count, per_page * PAGE, "scattered")
    to_reader, from_writer = writer.open(), reader.open()
    writer.connect(to_reader, reader.describe(from_writer))
    reader.connect(from_writer, writer.describe(to_reader, False))
    watch = writer.watch()
    order = cells.order(count, "scattered", 2).tolist()
    ours, theirs = [], []
    for turn in range(args.layers):
        key = reader.call("imm_allocate", from_writer)
        reader.call("imm_arm", key, count)
        transfer = writer.layer(to_reader, key, watch, turn + 1, order, per_page)
        reader.send("when_whole", key)
        time.sleep(0.002)
        moved = writer.bump_at(watch)
        ours.append(reader.receive() - moved)
        writer.wait(native.TRANSFER_DONE, transfer)
        reader.call("imm_retire", key)
        theirs.append(bare.round())
    for node in (reader, writer):
        node.stop()
    bare.close()
    for name, times in (("pdd: counter to last immediate seen", ours[5:]), ("libfabric: the same writes", theirs[5:])):
        rows.append({"what": f"{name}, 64 x 16 KiB", "p50 us": 1e6 * median(times), "p99 us": 1e6 * percentile(times, 0.99)})
    bounds.append(("a layer's latency of the bare writes' (p50)", median(ours[5:]) / median(theirs[5:]), "<=", 1.2))


def measure_posting(args: argparse.Namespace, rows: list[dict[str, Any]], bounds: Bounds) -> None:
    for idle in ("spin", "auto"):
        found = json.loads(subprocess.run([args.post, idle, "2000", "64"], capture_output=True, check=True).stdout)
        rows.append({"what": f"counter to first post, {idle}", "p50 us": found["p50_ns"] / 1e3, "p99 us": found["p99_ns"] / 1e3})
        if idle == "spin":
            bounds.append(("counter to first post, spinning (p50, us)", found["p50_ns"] / 1e3, "<=", 10.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    built = {name: str(BUILD / name) if (BUILD / name).exists() else "" for name in ("bare_loop", "copy_loop", "post_latency")}
    parser.add_argument("--peers", type=Path, default=ROOT / "build/peers", help="where tools/peers.sh put NIXL and Mooncake")
    parser.add_argument("--bare", default=built["bare_loop"], help="path of the bare_loop program")
    parser.add_argument("--copy", default=built["copy_loop"], help="path of the copy_loop program")
    parser.add_argument("--post", default=built["post_latency"], help="path of the post_latency program")
    parser.add_argument("--library", default="", help="libfabric to use (default: the one a node would choose)")
    parser.add_argument("--providers", default="tcp", help="pdd's, with commas")
    parser.add_argument("--sizes", default="4KiB,16KiB,64KiB,256KiB,1MiB,4MiB")
    parser.add_argument("--layout", default="scattered,adjacent")
    parser.add_argument("--seconds", type=float, default=0.3, help="of one turn: 16 requests of 64 MiB at once are 0.2 s")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=205, help="for latency, the first 5 not counted")
    parser.add_argument("--without", default="", help="contenders to leave out, with commas")
    parser.add_argument("--only", choices=("rates", "latency"))
    parser.add_argument("--model", help="not used: make bench gives it to every benchmark")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    args.peers, args.without = args.peers.absolute(), args.without.split(",")
    chosen = native.library(args.library)
    args.library = chosen["path"]
    args.provider = native.probe(args.library, "tcp")[0]["provider"]

    rows: list[dict[str, Any]] = []
    bounds: Bounds = []
    void: list[str] = []
    if args.only != "latency":
        void = measure_rates(args, rows, bounds)
    if args.only != "rates":
        start, everyone, before = time.perf_counter(), cpu_seconds([])[0], os.times()
        found: Bounds = []
        if args.bare:
            measure_latency(args, rows, found)
        if args.post:
            measure_posting(args, rows, found)
        own = sum(os.times()[:4]) - sum(before[:4])  # this process and those that it waited for
        foreign = (cpu_seconds([])[0] - everyone - own) / (time.perf_counter() - start)
        if foreign > FOREIGN:
            void.append(f"latency: others used {foreign:.2f} cores")
        else:
            bounds += found
    title = f"64 pages a request, {DEPTH} at once, {args.provider} of {chosen['version']}"
    code = report(title, rows, bounds, args.json)
    for cell in void:
        print(f"  VOID   {cell}")
    return 1 if void else code


if __name__ == "__main__":
    sys.exit(main())
