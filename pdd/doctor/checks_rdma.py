"""Judgements of drivers, NICs and libfabric. See checks.py."""

from __future__ import annotations

from pdd.doctor.facts import Facts
from pdd.doctor.verdict import FAIL, PASS, SKIP, WARN, Verdict
from pdd.findings import Finding
from pdd.units import counted

_LINK_LOCAL = "fe80:"


def told(facts: Facts, *ids: str) -> list[Finding]:
    """What the topology found of these kinds."""
    return [each for each in facts.findings if each.id in ids]


def _joined(found: list[Finding]) -> str:
    return "; ".join(each.message for each in found)


def driver(facts: Facts) -> Verdict:
    topology, seen = facts.topology, facts.driver
    nvidia = [gpu for gpu in topology.gpus if gpu.vendor == "nvidia"]
    if not topology.gpus and not seen.nvidia:
        return Verdict(SKIP, "no GPU: ranks run on CPUs")
    if nvidia and not seen.nvidia:
        return Verdict(FAIL, f"{counted(len(nvidia), 'GPU')} of NVIDIA, and no driver is loaded", None, "a version",
                       ("`modprobe nvidia`; `dmesg | grep -i nvidia` says why it fails",))
    missing = sorted({"nvidiactl", "nvidia-uvm"} - seen.nodes) if nvidia else []
    if missing:
        fix = ("`nvidia-modprobe -u -c=0`", "unit: DeviceAllow=, ExecStartPre= of pdd@.service", "container: --gpus all")
        message = f"driver {seen.nvidia} is loaded, and /dev/{', /dev/'.join(missing)} is not there"
        return Verdict(FAIL, message, missing, [], fix)
    version = seen.nvidia or "of another vendor"
    return Verdict(PASS, f"driver {version}, {counted(len(topology.gpus), 'GPU')}", seen.nvidia or None)


def modules(facts: Facts) -> Verdict:
    nics, seen = facts.topology.rdma_nics, facts.driver
    if not nics:
        return Verdict(SKIP, "no RDMA NIC: KV travels over tcp")
    if "ib_uverbs" not in seen.modules:
        return Verdict(FAIL, "the module ib_uverbs is not loaded: no program can use the NICs", sorted(seen.modules),
                       ["ib_uverbs"], ("`modprobe ib_uverbs`", "install rdma-core, whose units load it"))
    if not any(node.startswith("infiniband/uverbs") for node in seen.nodes):
        return Verdict(FAIL, "there is no /dev/infiniband/uverbs here", sorted(seen.nodes), ["infiniband/uverbs0"],
                       ("unit: DeviceAllow=char-infiniband_verbs rw", "container: --device=/dev/infiniband"))
    return Verdict(PASS, f"loaded: {', '.join(sorted(seen.modules))}", sorted(seen.modules))


def nic_states(facts: Facts) -> Verdict:
    nics = facts.topology.rdma_nics
    if not nics:
        return Verdict(SKIP, "no RDMA NIC: KV travels over tcp")
    states = {nic.name: nic.state for nic in nics}
    wrong = told(facts, "T011", "T012", "T013", "T016", "T017")
    if not any(nic.usable for nic in nics):
        return Verdict(FAIL, f"none of {counted(len(nics), 'RDMA NIC')} can be used: {_joined(wrong)}", states, "active",
                       ("`rdma link`, `ibstat` and the cables", "InfiniBand: is there a subnet manager?"))
    if wrong:
        return Verdict(WARN, _joined(wrong), states, "active", ("`rdma link`, `ibstat` and the cables",))
    return Verdict(PASS, f"{counted(len(nics), 'RDMA NIC')} active", states)


def gids(facts: Facts) -> Verdict:
    nics = [nic for nic in facts.topology.rdma_nics if nic.kind == "roce" and nic.usable]
    if not nics:
        return Verdict(SKIP, "no RoCE NIC in use: there is no GID to choose")
    found = {nic.name: f"{nic.gid} (index {nic.gid_index})" if nic.gid else None for nic in nics}
    bad = [nic.name for nic in nics if not nic.gid or nic.gid.lower().startswith(_LINK_LOCAL)]
    if bad:
        return Verdict(WARN, f"{', '.join(bad)}: no GID that other networks can reach", found, "a routable address",
                       ("give the interface of the NIC an IP address", "`show_gids` lists what there is"))
    return Verdict(PASS, ", ".join(f"{name} {gid}" for name, gid in found.items()), found)


def gpu_direct(facts: Facts) -> Verdict:
    way = facts.topology.limits.gpu_direct
    if not facts.topology.gpus or not facts.topology.rdma_nics:
        return Verdict(SKIP, "no pair of a GPU and an RDMA NIC")
    if way is None:
        return Verdict(SKIP, "how a NIC reads GPU memory is known of NVIDIA's driver alone")
    if way == "none":
        return Verdict(WARN, "NICs cannot read GPU memory: KV is staged through host memory", way, "dma-buf",
                       ("install the open kernel modules of NVIDIA, on Linux 5.12 or newer", "or `modprobe nvidia_peermem`"))
    return Verdict(PASS, f"NICs read GPU memory by {way}", way)


def acs(facts: Facts) -> Verdict:
    if not facts.topology.gpus or not facts.topology.rdma_nics:
        return Verdict(SKIP, "no pair of a GPU and an RDMA NIC")
    found = told(facts, "T032")
    if found:
        bridges = sorted(facts.topology.acs_redirects)
        return Verdict(WARN, _joined(found), bridges, [],
                       (*(f"`setpci -s {bridge} ECAP_ACS+6.w=0000`, at each boot" for bridge in bridges[:4]),
                        "or turn ACS off in the firmware; in a virtual machine, on the host"))
    return Verdict(PASS, "no switch sends what a GPU and its NIC exchange through the CPU", [])


def library(facts: Facts) -> Verdict:
    found = facts.library
    if found.error:
        return Verdict(FAIL, found.error, None, "libfabric 1.17 or newer",
                       ("install the extra [fabric], or Debian's libfabric1", "or set fabric.library"))
    others = [f"{each.path} ({each.version}): {each.why_not}" for each in found.candidates
              if each.why_not and each.version]
    more = f"; not used: {'; '.join(others)}" if others else ""
    return Verdict(PASS, f"{found.version} at {found.path}{more}", {"path": found.path, "version": found.version})


def providers(facts: Facts) -> Verdict:
    found = facts.library
    if found.error:
        return Verdict(SKIP, "there is no libfabric to ask")
    if found.offers is None:
        return Verdict(SKIP, "libfabric was not asked")
    offers = [f"{provider} {domain}" + (f" ({address})" if address else "") for provider, domain, address in found.offers]
    best = found.offers[0][0] if found.offers else ""
    if not found.offers:
        return Verdict(FAIL, f"libfabric offers nothing: {found.why_nothing}", [], facts.provider,
                       ("`fi_info` of that libfabric shows what it has", "or set fabric.provider, fabric.library"))
    if facts.required and facts.required != best:
        return Verdict(FAIL, f"fabric.require is {facts.required}, and libfabric offers {best}", offers, facts.required,
                       ("set fabric.library to one that has it", "or take fabric.require away"))
    if best == "tcp" and facts.topology.rdma_nics and facts.provider == "auto":
        return Verdict(WARN, f"only tcp, though there is {facts.topology.rdma_nics[0].name}", offers, "efa or verbs",
                       ("set fabric.library to a libfabric that drives the NIC", "verbs needs an address on its interface"))
    return Verdict(PASS, ", ".join(offers[:4]) + (f" and {len(offers) - 4} more" if len(offers) > 4 else ""), offers)
