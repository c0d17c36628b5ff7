"""The screen of the topology: which NIC each GPU uses and how near it is, the state of every NIC, what was found. Pure.

The same words as `pdd topology`; a star is what is chosen.
"""

from __future__ import annotations

from typing import Any

from pdd.topology.names import short_model
from pdd.tui.draw import Line, say
from pdd.tui.scene import Scene
from pdd.units import show_bytes

_CELL = 8


def lines(scene: Scene, width: int) -> list[Line]:
    """As many lines as there is to say; of several nodes one after the other."""
    made: list[Line] = []
    for node in scene.shown:
        document = node.docs.get("topology")
        if scene.many:
            made += [[(f" {node.name}", "title")]]
        if not document or "host" not in document:
            silent = "the daemon does not say its topology; `pdd topology` there reads the machine's"
            made.append(say(f" {silent if node.docs else 'waiting for the first picture'}", "dim"))
        else:
            made += _one(document, width)
        made.append([])
    return made[:-1] if made else []


def _one(document: dict[str, Any], width: int) -> list[Line]:
    gpus, nics = document["gpus"], document["nics"]
    made: list[Line] = [say(
        f" {document['host']}  {len(document['numa'])} NUMA  {len(gpus)} GPU  {len(nics)} NIC"
        f"  source {'+'.join(document['source']) or '-'}  cpus {document.get('cpus') or '-'}"
    )]
    made += [[], *_findings(document)] if document["findings"] else []
    if gpus:
        made += [[], *_matrix(document, width)]
    made += [[], *_nics(document)]
    made += [[], *_rails(document)] if document["rails"] else []
    return made


def _findings(document: dict[str, Any]) -> list[Line]:
    return [say(f" ! {each['message']}  [{each['id']}]", "bad" if each["level"] in ("fail", "error") else "warn")
            for each in document["findings"]]


def _matrix(document: dict[str, Any], width: int) -> list[Line]:
    """GPUs down, NICs across, in blocks of as many NICs as there is room for."""
    cells = {(pair["gpu"], pair["nic"]): pair for pair in document["pairs"]}
    named = [nic for nic in document["nics"] if any(pair["nic"] == nic["name"] for pair in document["pairs"])]
    head = 26
    per_block = max((width - head) // (_CELL + 1), 1)
    made: list[Line] = []
    for start in range(0, max(len(named), 1), per_block):
        block = named[start : start + per_block]
        made.append(say(f" {'GPU':{head - 1}}" + "".join(f"{nic['name'][:_CELL]:{_CELL + 1}}" for nic in block), "title"))
        for gpu in document["gpus"]:
            numa = "?" if gpu["numa"] is None else gpu["numa"]
            line = say(f" {_gpu_name(gpu, numa)[: head - 2]:{head - 1}}")
            for nic in block:
                line.append(_cell(cells.get((gpu["index"], nic["name"])), nic))
            made.append(line)
    if not named:
        made.append(say(" no RDMA NIC that a GPU could use", "dim"))
    return made


def _gpu_name(gpu: dict[str, Any], numa: object) -> str:
    return f"GPU{gpu['index']} numa{numa} {short_model(gpu['model'] or '')}"


def _cell(pair: dict[str, Any] | None, nic: dict[str, Any]) -> tuple[str, str]:
    if pair is None:
        return f"{'-':{_CELL + 1}}", "dim"
    if not nic["usable"]:
        return f"{(nic['state'] or 'no')[:_CELL]:{_CELL + 1}}", "bad"
    text = f"{pair['path']}*" if pair["chosen"] else pair["path"]
    far = pair["chosen"] and pair["path"] in ("SYS", "NODE", "PHB")
    return f"{text:{_CELL + 1}}", "warn" if far else "good" if pair["chosen"] else ""


def _nics(document: dict[str, Any]) -> list[Line]:
    if not document["nics"]:
        return [say(" no NIC", "dim")]
    made: list[Line] = [say(f" {'NIC':14} {'NETDEV':12} {'KIND':9} {'STATE':10} {'RATE':>9} {'NUMA':>4}  GID", "title")]
    for nic in document["nics"]:
        rate = nic["rate_bits_per_second"]
        shown = show_bytes(rate, "b/s") if rate else "-"
        gid = "-" if nic.get("gid") is None else f"{nic['gid_index']}: {nic['gid']}"
        style = "good" if nic["usable"] else "bad"
        made.append([
            (f" {nic['name'][:14]:14} {(nic['netdev'] or '-')[:12]:12} {nic['kind'][:9]:9} ", ""),
            (f"{(nic['state'] or '-')[:10]:10} ", style),
            (f"{shown:>9} {'-' if nic['numa'] is None else nic['numa']:>4}  {gid}", ""),
        ])
    return made


def _rails(document: dict[str, Any]) -> list[Line]:
    made: list[Line] = [say(" RAIL", "title")]
    for rail in document["rails"]:
        who = "CPU rank" if rail["gpu"] is None else f"GPU{rail['gpu']}"
        nics = ", ".join(rail["nics"]) or "no RDMA NIC"
        line = say(f" {who:9} {nics}  {rail['path'] or ''}  cpus {rail['worker_cpus'] or '-'}  ")
        made.append([*line, (f"({rail['why']})", "dim")])
    return made
