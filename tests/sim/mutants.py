"""Bugs that the simulations must find: each is one small edit of the real source.

    python -m tests.sim.mutants [NAME...]       plants them one by one and says which seed found each
    python -m tests.sim.mutants --list

A bug of native/ is planted in a copy of the sources under build/, of which only what it touches is built again; that
is why they all sit in .cpp files. A bug of the messenger is planted in the module's source as it is imported, in a
process of its own. Without names, both simulations are played without a bug first: then all seeds must be good.
Exit 0: all were found; 1: one was not.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import pathlib
import shutil
import subprocess
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
MOST_SEEDS = 2000
_MOST_SECONDS = 600  # of one play; a bug that makes it hang is an error here, not a find


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old` stands exactly once in the file."""

    name: str
    path: str
    old: str
    new: str

    @property
    def is_native(self) -> bool:
        return self.path.startswith("native/")

    def plant(self, source: str) -> str:
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.path} has {source.count(self.old)} places to plant it, not one")
        return source.replace(self.old, self.new)


MUTANTS = (
    # -- the messenger
    Mutant("pages freed on cancel at once", "pdd/messenger/decoder.py",
           "        attempt.link.send(wire.Cancel(attempt=attempt.id))\n",
           "        attempt.link.send(wire.Cancel(attempt=attempt.id))\n"
           "        self._settling.settle(attempt, KvOutcome.RELEASED, why)\n"),
    Mutant("missing tombstone", "pdd/messenger/prefiller.py",
           "            view.tombstones.add(attempt, self._context.clock())", "            len(view.tombstones)"),
    Mutant("stale epoch accepted", "pdd/messenger/requests.py",
           "    if request.epoch != peer.epoch:\n", "    if request.epoch == 0:\n"),
    Mutant("key reused while its link is fenced", "pdd/messenger/settling.py",
           "        attempt.state.move(AttemptState.FENCING, str(link.error))\n",
           "        attempt.state.move(AttemptState.FENCING, str(link.error))\n"
           "        self._book._fabric.imm_retire(attempt.key)\n"
           "        attempt.key = None\n"),
    Mutant("fence forgotten by the link", "pdd/messenger/link.py",
           "        self._way.close()\n", "        asyncio.get_running_loop().call_soon(self._become_closed)\n"),
    Mutant("counts that do not agree are released", "pdd/messenger/decoder.py",
           "        elif arrived == ended.ok_units:\n", "        elif arrived <= ended.ok_units:\n"),
    Mutant("source pages given back on cancel at once", "pdd/messenger/job.py",
           "self.sink_is_closed and self.end is not None", "self.sink_is_closed"),
    Mutant("attempt taken twice", "pdd/messenger/prefiller.py",
           "        if request.attempt in view.jobs or request.attempt in view.answered:\n",
           "        if request.attempt in view.jobs and request.attempt in view.answered:\n"),
    # -- the workers
    Mutant("early immediate dropped", "native/fabric/imm_table.cpp",
           "slot->endpoint.load() != endpoint)", "slot->endpoint.load() != endpoint || slot->expected.load() == 0)"),
    Mutant("key reused too early", "native/fabric/imm_table.cpp",
           "    generations_[index] = (generations_[index] + 1) % kGenerations;\n    free_.push_back(index);",
           "    free_.push_front(index);"),
    Mutant("unit counted twice", "native/fabric/imm_table.cpp",
           "word + imm_units(imm);", "word + imm_units(imm) + 1;"),
    Mutant("fence forgotten on all NICs but one", "native/fabric/endpoint.cpp",
           "    for (auto& port : ports_) {\n        Status closed",
           "    for (auto& port : std::span(ports_).first(1)) {\n        Status closed"),
    Mutant("key of another NIC of the peer", "native/fabric/endpoint.cpp", ".keys[route.key];", ".keys[0];"),
    Mutant("window ignored", "native/fabric/sender.cpp", "return lane.window.admits(nbytes) && (", "return ("),
    Mutant("window of a NIC ignored", "native/fabric/sender.cpp", "shared_.nic_windows[lane.nic].admits(nbytes)", "true"),
    Mutant("room of the peer ignored", "native/fabric/sender.cpp",
           "std::min(window_.ops / lane.sharing, lane.max_ops)", "window_.ops / lane.sharing"),
    Mutant("transfer over on cancel at once", "native/fabric/sender.cpp",
           "    if (!transfer.done()) return;", "    if (!transfer.done() && !transfer.dropping()) return;"),
    Mutant("transfer taken on after the endpoint failed", "native/fabric/sender.cpp",
           "    if (!failure_.empty()) drop(opened, failure_);\n", ""),
    Mutant("failure told again", "native/fabric/sender.cpp",
           "    if (!failure_.empty()) return;\n    failure_ = reason;", "    failure_ = reason;"),
    Mutant("unknown fate taken for a failure", "native/fabric/sender.cpp",
           "        default:\n            return Fate::Unknown;", "        default:\n            return Fate::Failed;"),
    Mutant("write in flight taken for done when its endpoint closes", "native/fabric/sender.cpp",
           "settle(op, Fate::Unknown);", "settle(op, Fate::Ok);"),
    Mutant("scattered pages merged", "native/fabric/write_plan.cpp",
           "last.src_offset + last.nbytes == src && last.dst_offset + last.nbytes == dst",
           "last.src_offset + last.nbytes == src"),
    Mutant("alarm left behind", "native/fabric/worker.cpp",
           "    alarms_.clear(std::exchange(dropped_alarms_, {}));", "    dropped_alarms_.clear();"),
    Mutant("completion that is told twice believed", "native/fabric/sender.cpp",
           "op->transfer == nullptr || op->transfer->endpoint() != endpoint_", "false"),
    Mutant("completion that is told twice taken for another endpoint's", "native/fabric/sender.cpp",
           "op->transfer == nullptr || op->transfer->endpoint() != endpoint_", "op->transfer == nullptr"),
    Mutant("wholeness not told when armed late", "native/fabric/imm_table.cpp",
           "    return tell(*slot, slot->word.load());", "    return {Outcome::Counted, expected};"),
    # -- copies between GPUs and the wire
    Mutant("counted before it is in the device", "native/gpu/staged_port.cpp",
           "        const auto state = incoming_[slot].mark.state();\n        if (state == CopyMark::State::Pending) break;",
           "        const auto state = incoming_[slot].mark.state();"),
    Mutant("sent before it is out of the device", "native/gpu/staged_port.cpp",
           "        const auto state = outgoing_[slot].mark.state();\n        if (state == CopyMark::State::Pending) break;",
           "        const auto state = CopyMark::State::Passed;"),
    Mutant("slot given back before its copy ended", "native/gpu/staged_port.cpp",
           "    landing_.push_back(slot);", "    landing_.push_back(slot);\n    credits_.push_back(slot);"),
    Mutant("slot used again without the peer's leave", "native/gpu/staged_port.cpp",
           "    if (error != 0 || out.credited) finish(slot, error);", "    finish(slot, error);"),
    Mutant("fence that waits for no copy", "native/gpu/staged_port.cpp",
           "    Status ended = wait_for_copies();", "    Status ended;"),
    Mutant("pinned memory of a fence that does not stand", "native/gpu/staged_port.cpp",
           "        landing_block_ = send_block_ = nullptr;\n"
           "        [[maybe_unused]] auto* leaked_landing = landing_memory_.release();\n"
           "        [[maybe_unused]] auto* leaked_send = send_memory_.release();\n", ""),
    Mutant("slots sent on after one of unknown fate", "native/gpu/staged_port.cpp",
           "    if (error != 0) fail(\"writing to the peer's slot: \" + nic_.error_text(error));\n", ""),
    Mutant("offset taken for an address", "native/gpu/staged_port.cpp",
           "nic_.in().to_device(memory->base + header.pieces[i].to,", "nic_.in().to_device(memory->base,"),
    # -- memory that two processes share
    Mutant("copy counted though its writer closed meanwhile", "native/fabric/local_channel.cpp",
           "        if (writer_closed()) {\n            ended_ = true;", "        if (false) {\n            ended_ = true;"),
    Mutant("writer that closes and does not say so", "native/fabric/local_channel.cpp",
           "    segment_.ring().writer_closed.store(1);", ""),
    Mutant("piece of a local write left out", "native/fabric/local_channel.cpp",
           "    for (uint16_t i = 0; i < entry.num_pieces; ++i) {\n        const auto& piece = entry.pieces[i];\n        std::memcpy",
           "    for (uint16_t i = 0; i < 1; ++i) {\n        const auto& piece = entry.pieces[i];\n        std::memcpy"),
    Mutant("local write carried out twice", "native/fabric/local_channel.cpp",
           "ring.done.store(++done_, std::memory_order_release);\n        ++found;",
           "ring.done.store(done_ += found != 0, std::memory_order_release);\n        ++found;"),
)  # fmt: skip


class NativeTree:
    """A copy of the sources of fabric_sim, kept from run to run, built once and then in parts."""

    def __init__(self) -> None:
        directory = REPOSITORY / "build" / "mutants"
        self.root = directory / "tree"
        self.build = directory / "build"
        self._sync()
        cmake, ninja = tool("cmake"), tool("ninja")
        self._run(cmake, "-S", self.root, "-B", self.build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}",
                  "-DCMAKE_BUILD_TYPE=None", "-DPDD_NATIVE_TESTS=ON", "-DPDD_MODULES=OFF", "-DPDD_WERROR=OFF")  # fmt: skip

    def _sync(self) -> None:
        """Only what differs is written: the rest need not be built again."""
        for top in ("CMakeLists.txt", "native", "tests/native"):
            for source in (REPOSITORY / top, *(REPOSITORY / top).rglob("*")):
                copy = self.root / source.relative_to(REPOSITORY)
                if source.is_file() and not (copy.exists() and copy.read_bytes() == source.read_bytes()):
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(source.read_bytes())

    def _run(self, *command: object) -> None:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")

    def play(self) -> str:
        """What fabric_sim says of the first bad seed; "" when all are good."""
        self._run(tool("cmake"), "--build", self.build, "--target", "fabric_sim")
        (program,) = self.build.glob("tests/native/sim/fabric_sim")
        return outcome([program, "--seeds", MOST_SEEDS, "--history", 5])

    def play_with(self, mutant: Mutant) -> str:
        path = self.root / mutant.path
        sound = path.read_text()
        path.write_text(mutant.plant(sound))
        try:
            return self.play()
        finally:
            path.write_text(sound)


def tool(name: str) -> str:
    """A build tool: the environment's own, else the system's."""
    own = pathlib.Path(sys.executable).with_name(name)
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is missing: run `make setup`")
    return found


def outcome(command: Sequence[object]) -> str:
    """What a simulation says of its first bad seed, "" when all are good. Raises when that seed did not replay."""
    words = [str(word) for word in command]
    played = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, timeout=_MOST_SECONDS)
    lines = [line for line in played.stdout.splitlines() if line.startswith("seed ")]
    if played.returncode == 0 and not lines and not played.stderr:
        return ""
    if played.returncode != 1 or played.stderr or not lines or any("DID NOT REPLAY" in line for line in lines):
        raise RuntimeError(f"{' '.join(words)}: no verdict that replays:\n{played.stdout}{played.stderr}")
    return lines[0]


def play_messenger(mutant: Mutant | None = None) -> str:
    """As `NativeTree.play`, in a process of its own."""
    if mutant is None:
        return outcome([sys.executable, "-m", "tests.sim.messenger_sim", "--seeds", MOST_SEEDS, "--history", 5])
    return outcome([sys.executable, "-m", "tests.sim.mutants", "--play", mutant.name])


class Planted(SourceFileLoader):
    """Loads one module of the messenger with a bug in it."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.path.removesuffix(".py").replace("/", "."), str(REPOSITORY / mutant.path))
        self._mutant = mutant

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self._mutant.plant(pathlib.Path(self.path).read_text()).encode(), self.path)


def plant_and_play(mutant: Mutant) -> int:
    """Plants a bug of the messenger in this process, for good, and plays. 1: it was found."""
    loader = Planted(mutant)
    spec = importlib.util.spec_from_file_location(loader.name, loader.path, loader=loader)
    assert spec is not None
    sys.modules[loader.name] = module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)

    from tests.sim import messenger_sim  # only now: it imports what was planted

    bad, _ = messenger_sim.play_until_bad(range(1, MOST_SEEDS + 1))
    if bad is None:
        return 0
    messenger_sim.report(bad, 5)
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plants bugs and says which seed finds each.")
    parser.add_argument("names", nargs="*", help="some of them; none: all")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--play", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    unknown = [name for name in options.names if name not in by_name]
    if unknown:
        parser.error(f"no such bug: {', '.join(unknown)}; --list names them")
    if options.list:
        print("\n".join(by_name))
        return 0
    if options.play:
        return plant_and_play(by_name[options.play])
    chosen = [by_name[name] for name in options.names] or list(MUTANTS)
    tree = NativeTree() if any(mutant.is_native for mutant in chosen) else None
    if tree is not None and not options.names:
        for found in (tree.play(), play_messenger()):
            if found:
                print(f"{'no bug is planted, and yet':64}{found}")
                return 1
    missed = 0
    for mutant in chosen:
        found = tree.play_with(mutant) if tree is not None and mutant.is_native else play_messenger(mutant)
        missed += not found
        print(f"{mutant.name:64}{found or f'NOT FOUND in {MOST_SEEDS} seeds'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} bugs were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
