"""Files that are broken, or made to hurt: one error each, at a bounded cost, and nothing touched."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from pdd import cli
from pdd.errors import EXIT_CONFIG, TopologyError
from pdd.topology import archive, cpus, source, xml_tree
from pdd.topology.files import Memory, Tree
from tests.topology import machines


def refused(path: Path) -> str:
    with pytest.raises(TopologyError) as caught:
        source.load(path)
    assert caught.value.hint
    return str(caught.value)


def tar(path: Path, *members: tuple[str, bytes | str]) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                file.addfile(member)
            else:
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    return path


LAUGHS = """<?xml version="1.0"?><!DOCTYPE lolz [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]>
<topology version="2.0"><object type="Machine" cpuset="0x1"><info name="HostName" value="&b;"/></object></topology>"""
OUTSIDE = """<?xml version="1.0"?><!DOCTYPE t [<!ENTITY x SYSTEM "file:///etc/passwd">]><topology>&x;</topology>"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("hello", "is neither a tar of a sysfs tree nor XML"),
        ("<topology><object", "broken XML: "),
        ("<topology></system>", "broken XML: mismatched tag"),
        ("<html><body/></html>", "XML of another kind: <html>"),
        ("<topology/>", "describes no CPU, GPU or NIC"),
        ("<system/>", "describes no CPU, GPU or NIC"),
        ('<?xml version="1.0" encoding="martian"?><topology/>', ""),
        (LAUGHS, "declares the XML entity 'a'"),
        (OUTSIDE, "declares the XML entity 'x'"),
        ("<topology>" + "<object>" * 300 + "</object>" * 300 + "</topology>", "nested deeper than 200"),
    ],
    ids=["empty", "text", "cut", "mismatch", "html", "no machine", "no system", "encoding", "laughs", "outside", "deep"],
)
def test_xml(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "file.xml"
    file.write_text(content)
    assert message in refused(file)
    assert str(file) in refused(file)


def test_too_many_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xml_tree, "MAX_ELEMENTS", 100)
    file = tmp_path / "file.xml"
    file.write_text("<topology>" + "<object/>" * 200 + "</topology>")
    assert "more than 100 XML elements" in refused(file)


def test_more_devices_than_a_machine_has(tmp_path: Path) -> None:
    gpus = "".join(f'<pci busid="{number:04x}:00:00.0" class="0x030200"/>' for number in range(300))
    file = tmp_path / "file.xml"
    file.write_text(f'<system version="1"><cpu numaid="0" affinity="1">{gpus}</cpu></system>')
    assert "300 GPUs, 0 NICs and 1 NUMA nodes are more than one machine has" in refused(file)


def test_odd_values_are_unknown_ones(tmp_path: Path) -> None:
    file = tmp_path / "file.xml"
    file.write_text("""<system version="1"><cpu numaid="zero" affinity="xyz"><pci busid="nonsense" class="0x030200"/>
      <pci busid="0000:01:00.0" class="0x030200" vendor="0x10de"><gpu dev="&lt;"/></pci>
      <pci class="0x020700"><nic><net name="a&#10;b" speed="fast"/></nic></pci></cpu>
      <cpu numaid="1" affinity="ffffffff"/></system>""")
    topology = source.load(file)
    assert [(gpu.pci.address, gpu.pci.numa) for gpu in topology.gpus] == [("0000:01:00.0", None)]
    assert [(nic.name, nic.rate_bits_per_second) for nic in topology.nics] == [("a?b", None)]


@pytest.mark.parametrize("name", ["../outside", "sys/../../outside", "sys/devices/../../../x"])
def test_a_tar_that_leads_out_of_itself(tmp_path: Path, name: str) -> None:
    assert "leads out of it" in refused(tar(tmp_path / "a.tar.gz", ("sys/devices/x", b""), (name, b"evil")))


def test_links_of_a_tar_stay_inside(tmp_path: Path) -> None:
    (tmp_path / "cpulist").write_text("0-63")
    file = tar(
        tmp_path / "a.tar.gz",
        ("sys/devices/system/node/node0/cpulist", str(tmp_path / "cpulist")),
        ("sys/devices/system/node/node1/cpulist", "../../../../../../../../../../../../" + str(tmp_path / "cpulist")),
        ("sys/devices/system/node/node2/cpulist", "cpulist"),
        ("sys/devices/system/node/node3/cpulist", "/sys/devices/system/node/real"),
        ("sys/devices/system/node/real", b"4-5\n"),
    )
    assert [node.cpus for node in source.load(file).numa] == [(), (), (), (4, 5)]


def test_a_tar_that_unpacks_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 1 << 20)
    assert "unpacks to more than 1 MiB" in refused(tar(tmp_path / "a.tar.gz", ("sys/devices/x", b"\0" * (4 << 20))))
    packed = tmp_path / "b.xml.gz"
    packed.write_bytes(gzip.compress(b"<topology>" + b" " * (4 << 20)))
    assert "unpacks to more than 1 MiB" in refused(packed)


def test_a_tar_with_too_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_ENTRIES", 10)
    file = tar(tmp_path / "a.tar.gz", *((f"sys/devices/{number}", b"") for number in range(20)))
    assert "more than 10 entries" in refused(file)


@pytest.mark.parametrize("keep", [30, 200, -40])
def test_a_cut_archive(tmp_path: Path, keep: int) -> None:
    whole = tar(tmp_path / "a.tar.gz", *((f"sys/devices/system/node/node{n}/cpulist", os.urandom(512)) for n in range(8)))
    whole.write_bytes(whole.read_bytes()[:keep])
    assert "a.tar.gz" in refused(whole)


def test_a_plain_tar_that_is_cut_or_damaged_between_its_entries(tmp_path: Path) -> None:
    """What is left of it looks like a smaller machine."""
    packed = tar(tmp_path / "a.tar.gz", *((f"sys/devices/system/node/node{n}/cpulist", b"0") for n in range(8)))
    whole = gzip.decompress(packed.read_bytes())
    file = tmp_path / "a.tar"
    file.write_bytes(whole)
    assert len(source.load(file).numa) == 8
    file.write_bytes(whole[: 4 * 1024])
    assert "the archive is broken" in refused(file)
    file.write_bytes(whole[: 4 * 1024] + b"\xff" * 512 + whole[4 * 1024 + 512 :])
    assert "the archive is broken" in refused(file)


def test_a_damaged_archive(tmp_path: Path) -> None:
    """One changed byte of a file: only the checksum at the very end can tell."""
    packed = tar(tmp_path / "a.tar.gz", ("sys/devices/system/node/node0/cpulist", b"0-1234"))
    stored = gzip.compress(gzip.decompress(packed.read_bytes()), 0)
    file = tmp_path / "stored.tar.gz"
    file.write_bytes(stored)
    assert len(source.load(file).cpus) == 1235
    file.write_bytes(stored.replace(b"0-1234", b"0-1235"))
    assert "CRC check failed" in refused(file)


def test_what_is_no_file(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refused(tmp_path / "nothing")
    os.mkfifo(tmp_path / "fifo")
    assert "neither a file nor a directory" in refused(tmp_path / "fifo")
    (tmp_path / "empty").mkdir()
    assert "holds no sys/" in refused(tmp_path / "empty")


def test_a_fifo_inside_a_tree_is_not_waited_for(tmp_path: Path) -> None:
    node = tmp_path / "sys/devices/system/node/node0"
    node.mkdir(parents=True)
    os.mkfifo(node / "cpulist")
    assert source.load(tmp_path).numa[0].cpus == ()


@pytest.mark.parametrize("wrap", ["plain", "below", "inside sys", "tar", "xz", "absolute"])
def test_where_a_tree_may_lie(tmp_path: Path, wrap: str) -> None:
    machines.laptop(tmp_path / "top")
    path = tmp_path / "top"
    if wrap == "below":
        path = tmp_path
    elif wrap == "inside sys":
        path = path / "sys"
    elif wrap in ("tar", "xz", "absolute"):
        path = tmp_path / "copy"
        with tarfile.open(path, "w:xz" if wrap == "xz" else "w") as file:
            for each in sorted((tmp_path / "top").rglob("*")):
                member = file.gettarinfo(each, str(each.relative_to(tmp_path)))
                member.name = f"/{each.relative_to(tmp_path / 'top')}" if wrap == "absolute" else f"./{member.name}"
                if member.isreg():
                    with each.open("rb") as content:
                        file.addfile(member, content)
                else:
                    file.addfile(member)
    assert [nic.kind for nic in source.load(path).nics] == ["wifi"]


def test_the_command_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.xml"
    file.write_text(LAUGHS)
    assert cli.run(["topology", "--input", str(file)]) == EXIT_CONFIG == 78
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"pdd: {file}: declares the XML entity 'a' [E782].")
    assert err.count("\n") == 1


@pytest.mark.parametrize("header", [{"GNU.sparse.map": "abc"}, {"GNU.sparse.size": "x"}, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}])
def test_extended_headers_that_are_no_numbers(tmp_path: Path, header: dict[str, str]) -> None:
    file = tmp_path / "a.tar"
    with tarfile.open(file, "w") as made:
        member = tarfile.TarInfo("sys/class/f")
        member.pax_headers = header
        made.addfile(member)
    assert "the archive is broken: bad extended header" in refused(file)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_a_chain_of_extended_headers(tmp_path: Path, kind: bytes) -> None:
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, 6
    chain = (member.tobuf(tarfile.GNU_FORMAT) + b"6 a=b\n".ljust(512, b"\0")) * 2000
    file = tmp_path / "a.tar"
    file.write_bytes(tarfile.TarInfo("sys/class/f").tobuf() + chain + bytes(1024))
    assert "the archive is broken: bad extended header" in refused(file)


def test_a_tar_of_endless_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "/".join("a" for _ in range(400))
    assert "directories deep" in refused(tar(tmp_path / "a.tar.gz", ("sys/devices/" + deep, b"")))
    monkeypatch.setattr(archive, "MAX_ENTRIES", 100)
    many = [(f"sys/{number}/a/b/c/d/e/f/g/h/i", b"") for number in range(20)]
    assert "more than 100 entries, their directories included" in refused(tar(tmp_path / "b.tar.gz", *many))


def test_a_link_that_leads_on_without_end() -> None:
    """Each turn through it adds 400 directories: the path stays short, and what it leads to is not there."""
    memory = Memory()
    memory.add_link("sys/x", "/sys/x/" + "/".join("b" for _ in range(400)))
    memory.add_link("sys/y", "/sys/x")
    resolved = Tree(memory).resolve("sys/y")
    assert len(resolved.split("/")) < 1000
    assert not Tree(memory).is_dir("sys/y")


def test_cpus_that_everybody_names(tmp_path: Path) -> None:
    """However often a CPU is named, it is in one node and in one core: memory does not grow with the names."""
    every = f"0-{cpus.MAX_CPUS - 1}"
    top = "sys/devices/system"
    file = tar(
        tmp_path / "a.tar.gz", (f"{top}/cpu/online", every.encode()), (f"{top}/cpu/cpu0/topology/core_cpus_list", every.encode()),
        *((f"{top}/node/node{number}/cpulist", every.encode()) for number in range(3)),
    )
    topology = source.load(file)
    assert [len(node.cpus) for node in topology.numa] == [cpus.MAX_CPUS, 0, 0]
    assert topology.cores == ()
    mask = ",".join(["0xffffffff"] * (cpus.MAX_CPUS // 32))
    cores = f'<object type="Core" cpuset="{mask}"/>' * 3
    file = tmp_path / "a.xml"
    file.write_text(f'<topology version="2.0"><object type="Machine" cpuset="{mask}">{cores}</object></topology>')
    assert [len(core) for core in source.load(file).cores] == [cpus.MAX_CPUS]
    assert cpus.parse_list(",".join([every] * 1000)) == ()


@pytest.mark.parametrize(
    "node", ['<cpu numaid="{}" affinity="1"/>', '<object type="NUMANode" os_index="{}" cpuset="0x1"/>'], ids=["nccl", "hwloc"]
)
def test_more_nodes_than_a_machine_has(tmp_path: Path, node: str) -> None:
    nodes = "".join(node.format(number) for number in range(3000))
    file = tmp_path / "file.xml"
    file.write_text(f'<system version="1">{nodes}</system>' if "numaid" in node else
                    f'<topology version="2.0"><object type="Machine" cpuset="0x1">{nodes}</object></topology>')
    assert "and 1025 NUMA nodes are more than one machine has" in refused(file)


_BIG = ("4294967296", "99999999999999999999", "-7", "1_0", "٣", "0x1")


@pytest.mark.parametrize("value", _BIG)
def test_an_index_that_no_kernel_gives_is_no_index(tmp_path: Path, value: str) -> None:
    file = tmp_path / "a.xml"
    file.write_text(
        f'<topology version="2.0"><object type="Machine" cpuset="0x3"><object type="Package" os_index="{value}" cpuset="0x3">'
        f'<object type="NUMANode" os_index="{value}" cpuset="0x2"/><object type="NUMANode" os_index="0" cpuset="0x1"/>'
        "</object></object></topology>"
    )
    topology = source.load(file)
    assert [(node.index, node.package) for node in topology.numa] == [(0, 0)]
    file.write_text(f'<system version="1"><cpu numaid="{value}" affinity="1"/><cpu numaid="1" affinity="2"/></system>')
    assert [node.index for node in source.load(file).numa] == [1]


@pytest.mark.parametrize("value", [*_BIG, "0", "1025"])
def test_links_that_no_gpu_has_are_not_counted(tmp_path: Path, value: str) -> None:
    file = tmp_path / "a.xml"
    pci = '<pci busid="0000:0{0}:00.0" class="0x030200" vendor="{1}" device="{1}"><gpu>{2}</gpu></pci>'
    link = f'<nvlink target="0000:02:00.0" count="{value}" tclass="0x030200"/>'
    file.write_text('<system version="1"><cpu numaid="0" affinity="1">' + pci.format(1, "0x10de", link)
                    + pci.format(2, "0x10de", "") + "</cpu></system>")
    topology = source.load(file)
    assert [(found.count, found.target_kind) for found in topology.links] == [(None, "gpu")]
    file.write_text(file.read_text().replace(f'count="{value}"', 'count="18"').replace('device="0x10de"', f'device="{value}"'))
    topology = source.load(file)
    assert [found.count for found in topology.links] == [18]
    assert topology.gpus[0].pci.device_id in (None, 0, 1, 0x1025)


def test_a_link_faster_than_anything_is_of_unknown_speed(tmp_path: Path) -> None:
    gpu = ('<object type="PCIDev" gp_index="{0}" pci_busid="0000:0{0}:00.0" pci_type="0302 [10de:2330] [0:0] a1"/>')
    file = tmp_path / "a.xml"
    for value, expected in (("25000", 25_000_000_000), ("9" * 30, None), ("1000000001", None)):
        matrix = (f'<distances2 name="NVLinkBandwidth" nbobjs="2"><indexes>1 2</indexes><u64values>0 {value} 0 0</u64values>'
                  "</distances2>")
        file.write_text('<topology version="2.0"><object type="Machine" cpuset="0x1"><object type="Bridge" bridge_type="0-1" '
                        f'bridge_pci="0000:[00-02]">{gpu.format(1)}{gpu.format(2)}</object></object>{matrix}</topology>')
        assert [link.bytes_per_second for link in source.load(file).links] == [expected]
