"""Judgements of what the settings of one node name. See checks.py."""

from __future__ import annotations

import stat

from pdd.doctor.facts import Facts, Port
from pdd.doctor.verdict import FAIL, PASS, SKIP, WARN, Verdict
from pdd.units import counted, show_bytes

_NO_SETTINGS = "there are no settings of a node to look at: name them with -c FILE"


def settings(facts: Facts) -> Verdict:
    if facts.problems is None:
        return Verdict(SKIP, _NO_SETTINGS)
    if not facts.problems:
        return Verdict(PASS, f"no problems in {facts.settings}", 0)
    wrong = any(problem.level == "error" for problem in facts.problems)
    shown = "; ".join(map(str, facts.problems))
    fix = ("`pdd config check` lists them with file and line",)
    return Verdict(FAIL if wrong else WARN, f"{counted(len(facts.problems), 'problem')}: {shown}", len(facts.problems), 0, fix)


def credentials(facts: Facts) -> Verdict:
    if not facts.credentials:
        return Verdict(SKIP, "the settings name no credential file")
    seen = {each.path: None if each.mode is None else f"{each.mode:04o}" for each in facts.credentials}
    lost = [each for each in facts.credentials if each.mode is None]
    if lost:
        known = all("systemd" in each.error for each in lost)
        message = "; ".join(f"{each.key}: {each.path}: {each.error}" for each in lost)
        return Verdict(SKIP if known else FAIL, message, seen, "0600",
                       () if known else ("the user of the daemon must be able to read it",))
    loose = [each for each in facts.credentials if (each.mode or 0) & (stat.S_IRWXO | stat.S_IWGRP)]
    if loose:
        message = "; ".join(f"{each.path} is open to others (mode {each.mode:04o})" for each in loose)
        return Verdict(WARN, message, seen, "0600", tuple(f"`chmod 600 {each.path}`" for each in loose))
    return Verdict(PASS, "; ".join(f"{path} {mode}" for path, mode in seen.items()), seen)


def model(facts: Facts) -> Verdict:
    if not facts.model:
        return Verdict(SKIP, "model.path is not set")
    if facts.memory.error:
        fix = ("set model.path, or make one with `pdd model import`", "the user of the daemon must be able to read it")
        return Verdict(FAIL, facts.memory.error, facts.model, "a model folder", fix)
    found = [each for each in facts.problems or () if each.key.startswith("model.")]
    if found:
        return Verdict(FAIL, "; ".join(each.message for each in found), facts.model, "a model folder",
                       tuple(each.hint for each in found if each.hint))
    return Verdict(PASS, f"{facts.model}, weights of {show_bytes(facts.memory.weights)}", facts.model)


def memory(facts: Facts) -> Verdict:
    seen = facts.memory
    if seen.weights is None or seen.kv is None or seen.free is None:
        return Verdict(SKIP, "the size of the model is not known")
    if facts.topology.gpus:
        return Verdict(SKIP, "what is free on a GPU is known when a rank starts")
    if facts.run_dir is not None and facts.run_dir.running is not None:
        return Verdict(SKIP, "the node runs: it has its memory")
    needed = seen.weights + seen.kv
    shown = f"weights {show_bytes(seen.weights)} and KV {show_bytes(seen.kv)}, {show_bytes(seen.free)} of memory are free"
    if needed > seen.free:
        return Verdict(FAIL, shown, needed, seen.free,
                       ("lower kv.num_pages or kv.memory_fraction", "free or add memory; raise MemoryMax= of the unit"))
    return Verdict(PASS, shown, needed, seen.free)


def ports(facts: Facts) -> Verdict:
    if facts.problems is None:
        return Verdict(SKIP, _NO_SETTINGS)
    running = None if facts.run_dir is None else facts.run_dir.running
    ours = [port for port in facts.ports if port.in_use and running is not None
            and (port.holder is None or port.holder.pid == running.pid)]
    wrong = [port for port in facts.ports if port.error and port not in ours]
    seen = {port.key: port.address for port in facts.ports}
    if wrong:
        fix = ("stop who holds it, or set another address", "`ss -ltnp` lists all listeners, to root with their names")
        return Verdict(FAIL, "; ".join(map(_why, wrong)), seen, "free", fix)
    held = " (of the running node)" if ours else ""
    return Verdict(PASS, ", ".join(f"{key} {address}" for key, address in seen.items()) + held, seen)


def _why(port: Port) -> str:
    if not port.in_use:
        return f"{port.key}: {port.address} cannot be used: {port.error}"
    holder = f"pid {port.holder.pid} ({port.holder.name})" if port.holder else "a process that this user may not see"
    return f"{port.key}: {port.address} is in use by {holder}"


def run_dir(facts: Facts) -> Verdict:
    place = facts.run_dir
    if place is None:
        return Verdict(SKIP, _NO_SETTINGS)
    if place.running is not None:
        return Verdict(PASS, f"{place.path} belongs to the running node (pid {place.running.pid or 'not known'})", place.path)
    if place.error:
        return Verdict(FAIL, f"{place.path}: {place.error}", place.path, "writable",
                       ("unit: RuntimeDirectory=", "else set control.dir or --run-dir, or run as the node's user"))
    stale = "; sockets of a node that died lie there, and the next start replaces them" if place.stale else ""
    return Verdict(PASS, f"{place.path} can be used{stale}", place.path)
