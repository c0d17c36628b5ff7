"""Every check of a machine and of a node's settings: one table, and a pure judgement over the facts for each entry.

A FAIL is what a start or the serving would stumble over, a WARN what costs speed or may go wrong later. What the settings do
not need is no fault: without RDMA nothing has to be locked. pdd-errors(7) lists the ids.
"""

from __future__ import annotations

from pdd.doctor import checks_node, checks_rdma
from pdd.doctor.facts import Facts
from pdd.doctor.verdict import FAIL, PASS, SKIP, WARN, Check, Verdict
from pdd.topology import cpus
from pdd.units import counted, show_bytes

_MANY_FILES = 4096  # sockets of clients and peers; a unit has more
_LITTLE_DISK, _NO_DISK = 1 << 30, 64 << 20


# -- limits ------------------------------------------------------------------------------------------------------------
def locked_memory(facts: Facts) -> Verdict:
    limit, needed = facts.memlock, facts.memory.kv
    if limit is None:
        return Verdict(SKIP, "the limit of locked memory cannot be read")
    shown = "unlimited" if limit.soft < 0 else show_bytes(limit.soft)
    if not facts.is_rdma:
        return Verdict(PASS, f"locked memory limit is {shown}; tcp needs none of it", limit.soft)
    if limit.soft < 0:
        return Verdict(PASS, "locked memory is unlimited", limit.soft, needed)
    fix = ("unit: LimitMEMLOCK=infinity", "shell: `ulimit -l unlimited`, or memlock in /etc/security/limits.d/pdd.conf",
           "container: --ulimit memlock=-1")
    if needed is None:
        return Verdict(WARN, f"locked memory limit is {shown}, and a NIC needs all KV memory locked", limit.soft, None, fix)
    if limit.soft < needed:
        return Verdict(FAIL, f"locked memory limit is {shown}, the KV pool needs {show_bytes(needed)}", limit.soft, needed, fix)
    return Verdict(PASS, f"locked memory limit is {shown}, the KV pool needs {show_bytes(needed)}", limit.soft, needed)


def open_files(facts: Facts) -> Verdict:
    limit = facts.open_files
    if limit is None:
        return Verdict(SKIP, "the limit of open files cannot be read")
    if limit.hard < 0:  # a node raises the soft limit to the hard one
        return Verdict(PASS, "any number of files may be open", limit.hard, facts.files_needed)
    fix = ("unit: LimitNOFILE=1048576", f"shell: `ulimit -Hn {_MANY_FILES}`, as root")
    if limit.hard < facts.files_needed:
        return Verdict(FAIL, f"{limit.hard} files may be open, these settings need {facts.files_needed}", limit.hard,
                       facts.files_needed, fix)
    if limit.hard < _MANY_FILES:
        return Verdict(WARN, f"{limit.hard} files may be open; each client and peer takes one", limit.hard, _MANY_FILES, fix)
    return Verdict(PASS, f"{limit.hard} files may be open", limit.hard, facts.files_needed)


def huge_pages(facts: Facts) -> Verdict:
    huge = facts.huge
    if not huge.transparent:
        return Verdict(SKIP, "whether the kernel makes huge pages cannot be read")
    more = f", of shared memory {huge.shared}" if huge.shared else ""
    more += f"; {huge.free} of {huge.total} reserved ones are free" if huge.total else ""
    if huge.transparent == "never":
        return Verdict(WARN, f"transparent huge pages are off{more}: weights and KV take more of the processor",
                       huge.transparent, "madvise", ("`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",))
    return Verdict(PASS, f"transparent huge pages are {huge.transparent}{more}", huge.transparent, "madvise")


# -- CPUs and memory ---------------------------------------------------------------------------------------------------
def cpuset(facts: Facts) -> Verdict:
    topology = facts.topology
    found = checks_rdma.told(facts, "T021", "T022")
    if found:
        return Verdict(WARN, found[0].message, cpus.as_list(topology.cpus), None,
                       ("unit: AllowedCPUs= and AllowedMemoryNodes= of the NUMA nodes of the GPUs", "container: --cpuset-cpus"))
    hidden = checks_rdma.told(facts, "T020")
    which = f"; {hidden[0].message}" if hidden else ""
    return Verdict(PASS, f"{counted(len(topology.cpus), 'CPU')} to use{which}", cpus.as_list(topology.cpus))


def numa(facts: Facts) -> Verdict:
    nodes = [node for node in facts.topology.numa if node.cpus]
    if not nodes:
        return Verdict(SKIP, "this machine tells nothing of NUMA nodes")
    found = checks_rdma.told(facts, "T014", "T015")
    if found:
        return Verdict(WARN, found[0].message, len(nodes), None, ("`pdd topology` shows what is near to what",))
    return Verdict(PASS, counted(len(nodes), "NUMA node"), len(nodes))


# -- system ------------------------------------------------------------------------------------------------------------
def time_of_day(facts: Facts) -> Verdict:
    clock = facts.clock
    if clock.now < clock.not_before:
        days = (clock.not_before - clock.now) / 86400
        return Verdict(FAIL, f"the clock is {days:.1f} days before pdd was installed: logs and TLS are wrong", clock.now,
                       clock.not_before, ("`timedatectl set-ntp true`, or set the clock by hand",))
    return Verdict(PASS, "the clock is not in the past", clock.now)


def time_kept(facts: Facts) -> Verdict:
    clock = facts.clock
    if clock.synchronised is None:
        return Verdict(SKIP, f"whether the clock is kept right cannot be asked ({clock.why_unknown})")
    if not clock.synchronised:
        return Verdict(WARN, "the clock is not synchronised: logs of several nodes do not fit together", False, True,
                       ("`timedatectl set-ntp true`, or install chrony", "container: the host's clock is what counts"))
    return Verdict(PASS, "the clock is synchronised", True)


def disk_space(facts: Facts) -> Verdict:
    if not facts.disks:
        return Verdict(SKIP, "none of the directories for state, logs and temporary files is there")
    least = min(facts.disks, key=lambda disk: (disk.free_inodes != 0, disk.free_bytes))
    seen = {disk.path: disk.free_bytes for disk in facts.disks}
    fix = ("`df -h` and `df -i` show which file system is full",)
    if least.free_inodes == 0:
        return Verdict(FAIL, f"no file can be made in {least.path} ({least.what}): no inode is free", seen, None, fix)
    level = FAIL if least.free_bytes < _NO_DISK else WARN if least.free_bytes < _LITTLE_DISK else PASS
    message = f"{show_bytes(least.free_bytes)} are free in {least.path} ({least.what})"
    return Verdict(level, message, seen, _LITTLE_DISK, () if level == PASS else fix)


CHECKS: tuple[Check, ...] = (
    Check("D001", "gpu", "driver", checks_rdma.driver),
    Check("D002", "fabric", "RDMA modules", checks_rdma.modules),
    Check("D010", "config", "settings", checks_node.settings),
    Check("D011", "config", "credential files", checks_node.credentials),
    Check("D012", "model", "model folder", checks_node.model),
    Check("D013", "model", "memory for model and KV", checks_node.memory),
    Check("D020", "limits", "locked memory", locked_memory),
    Check("D021", "limits", "open files", open_files),
    Check("D022", "limits", "huge pages", huge_pages),
    Check("D030", "fabric", "NIC states", checks_rdma.nic_states),
    Check("D031", "gpu", "ACS", checks_rdma.acs),
    Check("D032", "fabric", "GIDs", checks_rdma.gids),
    Check("D033", "gpu", "NIC to GPU memory", checks_rdma.gpu_direct),
    Check("D034", "fabric", "libfabric", checks_rdma.library),
    Check("D035", "fabric", "providers", checks_rdma.providers),
    Check("D040", "cpu", "cpuset", cpuset),
    Check("D041", "cpu", "NUMA", numa),
    Check("D050", "node", "ports", checks_node.ports),
    Check("D051", "node", "sockets", checks_node.run_dir),
    Check("D060", "system", "clock", time_of_day),
    Check("D061", "system", "clock is kept", time_kept),
    Check("D062", "system", "disk space", disk_space),
)
