"""Settings: sources, precedence, every mistake at once with its place, rules between settings, secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest

from pdd import config
from pdd.config import Config, all_fields
from pdd.config_credentials import read_credential
from pdd.config_load import ConfigProblems, load
from pdd.config_sources import from_flag, positions, search_path
from pdd.engine.request import KvSource
from pdd.messenger.router import route

BASE = {"PDD_NODE__ROLE": "both", "PDD_MODEL__PATH": "/m"}


def mistakes(
    *, env: dict[str, str] | None = None, file: Path | None = None, assignments: tuple[str, ...] = ()
) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        load(file, env=BASE if env is None else env, assignments=assignments, search=False)
    return [str(problem) for problem in caught.value.problems]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# -- sources -----------------------------------------------------------------------------------------------------------
def test_each_source_is_stronger_than_the_one_below(tmp_path: Path) -> None:
    file = write(
        tmp_path / "pdd.toml", '[node]\nrole = "both"\n[model]\npath = "/m"\n[kv]\npage_size = 1\nnum_pages = 1\n'
    )
    flags: list[object] = []
    seen = []
    for step in range(5):
        env = {}
        if step >= 1:
            write(tmp_path / "conf.d" / "10-a.toml", "[kv]\npage_size = 2\n")
        if step >= 2:
            write(tmp_path / "conf.d" / "20-b.toml", "[kv]\npage_size = 3\n")
        if step >= 3:
            env = {"PDD_KV__PAGE_SIZE": "4"}
        flags = ["kv.page_size=5"] if step >= 4 else []
        loaded, origins = load(file, env=env, assignments=flags)  # type: ignore[arg-type]
        seen.append((loaded.kv.page_size, str(origins["kv.page_size"])))
        assert loaded.kv.num_pages == 1  # a drop-in changes what it names and nothing else
    assert seen == [
        (1, f"{file}:6:1"),
        (2, f"{tmp_path}/conf.d/10-a.toml:2:1"),
        (3, f"{tmp_path}/conf.d/20-b.toml:2:1"),
        (4, "env PDD_KV__PAGE_SIZE"),
        (5, "--set"),
    ]


def test_a_set_is_stronger_than_a_flag_of_its_own_name() -> None:
    loaded, _ = load(
        env=BASE,
        flags=[from_flag("api.listen", "127.0.0.1:1", "--listen")],
        assignments=["api.listen=127.0.0.1:2"],
        search=False,
    )
    assert loaded.api.listen == "127.0.0.1:2"


def test_what_nobody_set_is_the_default() -> None:
    loaded, origins = load(env=BASE, search=False)
    assert origins["kv.page_size"].kind == "default"
    assert (loaded.kv.page_size, loaded.engine.max_batch_tokens, loaded.peers.heartbeat) == (16, 2048, 0.5)
    assert set(origins) == set(all_fields())


def test_text_is_read_by_the_type_of_the_key() -> None:
    sets = [
        "kv.num_pages=64",
        "kv.memory_fraction=0.5",
        "scheduler.local_prefill_fallback=true",
        "drain.timeout=1m30s",
        "fabric.window_bytes=1MiB",
        "node.role=decode",
        "peers.static=127.0.0.1:1, [::1]:2",
        'fabric.bind=["a", "b"]',
        "model.served_name=7",
    ]
    loaded, _ = load(env=BASE, assignments=sets, search=False)
    assert (loaded.kv.num_pages, loaded.kv.memory_fraction) == (64, 0.5)
    assert loaded.scheduler.local_prefill_fallback is True
    assert (loaded.drain.timeout, loaded.fabric.window_bytes) == (90.0, 1 << 20)
    assert loaded.peers.static == ("127.0.0.1:1", "[::1]:2")
    assert loaded.fabric.bind == ("a", "b")
    assert loaded.model.served_name == "7"


def test_the_config_is_frozen() -> None:
    loaded, _ = load(env=BASE, search=False)
    with pytest.raises(pydantic.ValidationError):
        loaded.kv.page_size = 1  # type: ignore[misc]


def test_where_the_file_is_looked_for() -> None:
    assert search_path({"PDD_CONFIG": "/x.toml", "HOME": "/h"}, is_root=False) == [Path("/x.toml")]
    assert search_path({"HOME": "/h"}, is_root=False) == [Path("/h/.config/pdd/pdd.toml"), Path("/etc/pdd/pdd.toml")]
    assert search_path({"HOME": "/h", "XDG_CONFIG_HOME": "/c"}, is_root=False)[0] == Path("/c/pdd/pdd.toml")
    assert search_path({"HOME": "/root"}, is_root=True) == [Path("/etc/pdd/pdd.toml")]


def test_a_named_file_that_is_missing_is_a_mistake(tmp_path: Path) -> None:
    missing = tmp_path / "no.toml"
    assert mistakes(file=missing) == [f"{missing}  cannot be read: No such file or directory"]
    with pytest.raises(ConfigProblems, match="cannot be read"):
        load(env={**BASE, "PDD_CONFIG": str(missing)})


# -- mistakes ----------------------------------------------------------------------------------------------------------
def test_every_mistake_at_once_in_reading_order(tmp_path: Path) -> None:
    file = write(
        tmp_path / "pdd.toml",
        '[node]\nrole = "decod"\n\n'
        '[engine]\n  threads = "x"\nmax_bath_size = 3\nstep_timeout = true\n'
        "[kvv]\na = 1\nb = 2\n",
    )
    found = mistakes(
        file=file, env={"PDD_ENGINE__MAX_BACTH": "1", "PDD_ROLE": "both"}, assignments=("kv.page_size=0", "zzz")
    )
    assert found == [
        f'{file}:2:1  node.role: "decod" is not a role; use "prefill", "decode" or "both"',
        f'{file}:5:3  engine.threads: "x" is not a whole number',
        f"{file}:6:1  engine.max_bath_size: no such setting; did you mean engine.max_batch_size?",
        f'{file}:7:1  engine.step_timeout: True is no duration; write a text like "30s"',
        f"{file}:9:1  kvv: no such section; did you mean kv?",
        f"{file}  model.path: required; the folder of the model (or start with --demo)",
        '--set  "zzz" is not an assignment; write --set section.key=value',
        "--set  kv.page_size: 0 must be at least 1",
        "environment  PDD_ROLE: no such setting; did you mean PDD_NODE__ROLE?",
        "environment  PDD_ENGINE__MAX_BACTH: no such setting; did you mean PDD_ENGINE__MAX_BATCH_SIZE?",
    ]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("kv.page_size=1.5", '"1.5" is not a whole number'),
        ("kv.memory_fraction=1", "must be less than 1"),
        ("kv.memory_fraction=lots", '"lots" is not a number'),
        ("drain.timeout=5x", '"5x" is not a duration'),
        ("drain.timeout=-5s", "is not a duration"),
        ("engine.step_timeout=0s", "must be more than 0"),
        ("top.interval=100ms", "100ms must be at least 250ms"),
        ("fabric.window_bytes=8M", '"8M" is not a size'),
        ("fabric.idle=hot", '"hot" is not an idle; use "auto", "spin" or "block"'),
        ("fabric.provider=net", "'net' is refused: libfabric before 1.18 calls tcp that; write tcp"),
        ("fabric.provider=tcp;ofi_rxm", "'tcp;ofi_rxm' is refused: it crashes"),
        ("fabric.provider=shm", "'shm' is refused: it cannot carry KV"),
        ("fabric.provider=tpc", "'tpc' is refused: it is none that pdd uses (one of efa, verbs, tcp)"),
        ("fabric.require=auto", "'auto' is refused"),
        ("scheduler.local_prefill_fallback=yes", '"yes" is not true or false'),
        ("node.name=a/b", '"a/b" is not a valid name'),
        ("api.listen=8000", "write HOST:PORT"),
        ("api.listen=::1:8000", "write IPv6 in brackets: [::1]:8000"),
        ("api.listen=127.0.0.1:99999", "is not a port"),
        ("peers.static=127.0.0.1:1,b", '"b" is not an address'),
        ("peers.static=10.0.0.300:1", '"10.0.0.300" is neither a host name nor an IP address'),
        ("peers.static=127.0.0.1:0", '"0" is not a port (1 to 65535)'),
        ("engine.step_timeout=30d", "30d must be at most 7d"),
        ("drain.timeout=1000000000000d", "must be at most 7d"),
        ("peers.heartbeat=" + "9" * 400, "must be at most 7d"),
        ("api.max_body=" + "9" * 400 + "TiB", "is more than any size"),
        ("api.max_body=2GiB", "2GiB must be at most 1GiB"),
        ("kv.num_pages=99999999999999999999999", "99999999999999999999999 must be at most 2147483647"),
        ("page_size=3", "is not an assignment"),
        ("engine.page_size=3", "no such setting; did you mean kv.page_size?"),
        ("kv.pagesize=3", "no such setting; did you mean kv.page_size?"),
        ("engine.colour=3", "no such setting"),
        ("engine.listen=3", "no such setting"),  # of two sections
    ],
)
def test_a_wrong_value_is_explained(assignment: str, message: str) -> None:
    found = mistakes(assignments=(assignment,))
    assert len(found) == 1
    assert message in found[0]
    assert "did you mean" in message or "did you mean" not in found[0]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("PDD_ROLE", "PDD_NODE__ROLE"), ("PDD_KV__PAGESIZE", "PDD_KV__PAGE_SIZE"), ("PDD_COLOUR", None), ("PDD_X__Y", None)],
)
def test_only_near_variables_are_suggested(name: str, suggestion: str | None) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load(env={**BASE, name: "x"}, search=False)
    assert [problem.suggestion for problem in caught.value.problems] == [suggestion]


def test_a_file_that_cannot_be_read_is_the_only_mistake(tmp_path: Path) -> None:
    """Without its settings nothing else can be judged."""
    file = write(tmp_path / "pdd.toml", "[node]\nrole = both\n")
    [only] = mistakes(file=file, env={})
    assert only.startswith(f"{file}:2:8  not TOML: ")
    assert mistakes(file=tmp_path / "no.toml", env={}) == [f"{tmp_path / 'no.toml'}  cannot be read: No such file or directory"]


def test_a_rule_between_settings_names_the_line_of_the_one_that_was_set(tmp_path: Path) -> None:
    file = write(tmp_path / "pdd.toml", '[peers]\nsuspect_after = "10s"\n')
    assert mistakes(file=file) == [f"{file}:2:1  peers.dead_after: must be longer than peers.suspect_after"]


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("[node\n", "1:6", "not TOML"),
        ("[node]\nrole = decode\n", "2:8", 'text needs quotes: role = "decode"'),
        ("[drain]\ntimeout = 30s # s\n", "2:13", 'text needs quotes: timeout = "30s"'),
        ("[api]\nlisten = 127.0.0.1:8000\n", "2:15", 'text needs quotes: listen = "127.0.0.1:8000"'),
        ("[api]\naccess_log = True\n", "2:14", "access_log: True is written true"),
        ('[node]\nname = "d0\n', "2:11", "the text of name has no quote at its end"),
        ("[node]\nname =\n", "2:7", "name has no value"),
        ("[node]\nname = []]\n", "2:10", "not TOML: expected newline"),
        ("[kv]\npage_size = 1\n[api]\npage_size = 1\nlisten = 1\npage_size = 2\n", "6:14",
         "page_size is there twice, first in line 4"),
        ("[kv]\npage_size = 1\n[api]\n[kv]\n", "4:4", "[kv] is there twice, first in line 1"),
        ('role = "both"\n', "1:1", "role: no such section"),
        ('node = 3\n', "1:1", "node: is a table; write [node]"),
        ('[node]\nname.x = "a"\nrole = "both"\n[model]\npath = "/m"', "2:1", "node.name"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, place: str, message: str) -> None:
    file = write(tmp_path / "a.toml", text)
    first = mistakes(file=file, env={})[0]
    assert first.startswith(f"{file}:{place}")
    assert message in first


def test_what_is_missing_is_missing_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "pdd.toml", '[node]\nnme = "x"\n')
    assert mistakes(file=file, env={"PDD_NODE__NAME": "../x"}) == [
        f"{file}:2:1  node.nme: no such setting; did you mean node.name?",
        f'{file}  node.role: required; use "prefill", "decode" or "both"',
        f"{file}  model.path: required; the folder of the model (or start with --demo)",
        'environment  PDD_NODE__NAME: "../x" is not a valid name: use 1 to 64 letters, digits, dots, hyphens and underscores, '
        "the first a letter or digit",
    ]
    assert mistakes(env={"PDD_NODE__ROLE": "both"}) == [
        "model.path: required; the folder of the model (or start with --demo)"]


def test_service_links_of_kubernetes_and_test_variables_are_passed_over() -> None:
    names = (
        "SERVICE_HOST SERVICE_PORT SERVICE_PORT_HTTP PORT DECODE_SERVICE_HOST PORT_8000_TCP X_PORT_8000_TCP_ADDR "
        "X_PORT_8000_TCP_PROTO TEST_MODEL"
    )
    links = {f"PDD_{name}": "x" for name in names.split()}
    load(env={**BASE, **links}, search=False)
    assert mistakes(env={**BASE, "PDD_SERVICE_HOSTS": "x"}) != []


# -- rules between settings --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (("node.role=prefill",), "peers.listen: required for role prefill"),
        (("peers.listen=0.0.0.0:7700",), "0.0.0.0:7700 is not loopback: peers must prove a shared token"),
        (("node.role=decode", "peers.static=127.0.0.1:1,10.0.0.1:7700"), "10.0.0.1:7700 is not loopback"),
        (("node.role=decode", "peers.static=node-3:7700"), "node-3:7700 is not loopback"),
        (("peers.static=127.0.0.1:0",), "is not a port"),
        (("peers.listen=127.0.0.1:0",), "127.0.0.1:0 has no port"),
        (("api.listen=127.0.0.1:0",), "127.0.0.1:0 has no port"),
        (("api.listen=[::]:8000",), "[::]:8000 is not loopback: clients must have a key"),
        (("peers.dead_after=1s",), "peers.dead_after: must be longer than peers.suspect_after"),
        (("peers.static=127.0.0.1:1",), "peers.static: role both prefills by itself and asks no prefiller; remove it, or"),
        (
            ("node.role=prefill", "peers.listen=127.0.0.1:2", "peers.static=127.0.0.1:1"),
            "peers.static: role prefill is asked, and connects to nobody; remove it, or set it on the decoders",
        ),
        (
            ("node.role=decode", "peers.static=127.0.0.1:1", "peers.listen=127.0.0.1:2"),
            "peers.listen: role decode takes no work of decoders; remove it, or use role prefill or both",
        ),
        (
            ("node.role=prefill", "peers.listen=127.0.0.1:2", "engine.dp=2"),
            "engine.dp: a node that takes prompts of decoders (peers.listen) has one group, whose layer counter tells when",
        ),
        (("peers.listen=127.0.0.1:2", "engine.dp=2"), "start more prefillers instead"),
        (("node.role=decode",), "peers.static: role decode needs a prefiller: set peers.static (--peer HOST:PORT), or"),
    ],
)
def test_settings_that_do_not_fit_together(assignments: tuple[str, ...], message: str) -> None:
    found = mistakes(assignments=assignments)
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    "assignments",
    [
        ("node.role=both", "peers.listen=127.0.0.1:2"),  # serves clients and decoders
        ("node.role=decode", "scheduler.local_prefill_fallback=true"),  # on its own until it is given prefillers
        ("node.role=decode", "peers.static=127.0.0.1:1"),
        ("node.role=decode", "peers.static=127.0.0.1:1", "engine.dp=4"),
        ("node.role=both", "engine.dp=4"),
        ("node.role=prefill", "peers.listen=127.0.0.1:2"),
    ],
)
def test_roles_that_fit_their_peers(assignments: tuple[str, ...]) -> None:
    load(env=BASE, assignments=assignments, search=False)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_no_role_both_waits_for_prefillers_and_is_waited_for(role: str) -> None:
    """Two nodes that each held pages for a prompt in the other's queue could wait for each other for ever."""
    found = mistakes(assignments=(f"node.role={role}", "peers.static=127.0.0.1:1", "peers.listen=127.0.0.1:2"))
    assert len(found) == 1
    if role == "decode":
        assert "takes no work of decoders" in found[0]
        return
    assert "peers.static" in found[0]
    assert route(role, 5000, 0) is KvSource.LOCAL


def test_each_bad_entry_of_a_list_is_one_line_with_its_number() -> None:
    sets = ("node.role=decode", "peers.static=nowhere,127.0.0.1:1,[::1]")
    assert [line.split(": ")[0] for line in mistakes(assignments=sets)] == ["--set  peers.static[0]", "--set  peers.static[2]"]
    sets = ("node.role=decode", "peers.static=127.0.0.1:1,10.0.0.1:7700,10.0.0.2:7700")
    assert [line.split(": ")[0] for line in mistakes(assignments=sets)] == ["--set  peers.static[1]", "--set  peers.static[2]"]
    found = mistakes(env={**BASE, "PDD_NODE__ROLE": "decode", "PDD_PEERS__STATIC": "127.0.0.1:1,x"})
    assert found[0].startswith("environment  PDD_PEERS__STATIC[1]: ")


def test_a_bad_entry_hides_no_rule_that_another_entry_breaks() -> None:
    sets = ("node.role=decode", "peers.static=nowhere,10.0.0.1:7700,[::1],10.0.0.2:7700")
    found = mistakes(assignments=sets)
    assert sorted(line.split(": ")[0][-2] for line in found) == ["0", "1", "2", "3"]
    assert sum("is not loopback" in line for line in found) == 2
    assert len(mistakes(assignments=("node.role=decode", "peers.static=nowhere"))) == 1  # not that there is no prefiller
    both = mistakes(assignments=("node.role=both", "peers.static=nowhere,127.0.0.1:1"))
    assert len(both) == 1  # nor that the list should not be there, until it is known what is in it


@pytest.mark.parametrize(("provider", "required", "fits"), [("auto", "efa", True), ("tcp", "tcp", True), ("tcp", "efa", False)])
def test_a_required_provider_is_one_that_is_asked_for(provider: str, required: str, fits: bool) -> None:
    sets = [f"fabric.provider={provider}", f"fabric.require={required}"]
    if fits:
        load(env=BASE, assignments=sets, search=False)
    else:
        assert mistakes(assignments=tuple(sets)) == [
            "--set  fabric.require: efa is required and fabric.provider asks for tcp: no start can have both"
        ]


def test_off_loopback_is_fine_with_secrets() -> None:
    sets = [
        "peers.listen=0.0.0.0:7700",
        "peers.token_credential=t",
        "api.listen=0.0.0.0:80",
        "api.api_keys_credential=k",
    ]
    assert load(env=BASE, assignments=sets, search=False)[0].peers.listen == "0.0.0.0:7700"
    load(
        env=BASE,
        assignments=["node.role=decode", "api.listen=localhost:1", "peers.static=[::ffff:127.0.0.1]:1"],
        search=False,
    )


def test_rules_are_checked_beside_other_mistakes_but_not_on_wrong_keys() -> None:
    found = mistakes(assignments=("kv.page_size=0", "peers.listen=0.0.0.0:7700"))
    assert len(found) == 2
    assert len(mistakes(assignments=("node.role=prefil",))) == 1  # nothing is said about what role prefill would need
    assert len(mistakes(assignments=("peers.dead_after=x", "peers.suspect_after=10s"))) == 1  # nor about a default


def test_demo_needs_no_model_and_has_a_role() -> None:
    loaded, origins = load(env={}, demo=True, search=False)
    assert (loaded.node.role, loaded.model.path) == ("both", "")
    assert load(env={"PDD_NODE__ROLE": "prefill", "PDD_PEERS__LISTEN": "127.0.0.1:7700"}, demo=True, search=False)[0].node.role == "prefill"
    assert origins["node.role"].kind == "default"


# -- secrets -----------------------------------------------------------------------------------------------------------
def test_credentials(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", "one\n\n  two \n")
    found = read_credential(str(file), "api.api_keys_credential")
    assert [secret.get_secret_value() for secret in found] == ["one", "two"]
    assert "one" not in repr(found)
    assert read_credential("keys", "k", {"CREDENTIALS_DIRECTORY": str(tmp_path)}) == found
    assert read_credential("", "k") == ()
    for name, message in ((str(tmp_path / "no"), "cannot be read"), (str(write(tmp_path / "empty", "\n")), "is empty")):
        with pytest.raises(ConfigProblems, match=message):
            read_credential(name, "k")


# -- the scanner -------------------------------------------------------------------------------------------------------
def test_positions_survive_strings_arrays_and_comments() -> None:
    text = '''# [a]
[node]
  role = "x # [kv]"   # y = 1
text = """
[kv]
page_size = 1
"""
list = [ "]", # [kv]
  "[kv]",
]
raw = \'\'\'
[fabric]\'\'\'
inline = { a = 1,
  }
nested = [
[1],
]
"quoted key" = 1
a.b = 2
[kv]
page_size = 3
'''
    found = positions(text)
    assert found["node", "role"] == (3, 3)
    assert found["node", "list"] == (8, 1)
    assert found["node", "quoted key"] == (18, 1)
    assert found["node", "a", "b"] == (19, 1)
    assert found["kv",] == (20, 2)
    assert found["kv", "page_size"] == (21, 1)
    assert ("fabric",) not in found


def test_every_number_has_an_upper_bound() -> None:
    """One without is handed on until something overflows, in the middle of a life."""
    unbounded = [
        key for key, field in all_fields().items()
        if field.annotation in (int, float)
        and not any(getattr(each, "le", None) is not None or getattr(each, "lt", None) is not None for each in field.metadata)
    ]
    assert not unbounded


def test_a_file_of_settings_is_bounded(tmp_path: Path) -> None:
    """/dev/zero never ends; a device or a pipe is read like a file, as far as settings go."""
    for path in (Path("/dev/zero"), tmp_path / "long.toml"):
        if path.parent == tmp_path:
            path.write_text("#" * (1 << 20) + "\n")
        with pytest.raises(ConfigProblems, match="cannot be read: it is longer than 1 MiB"):
            load(path, env={})
    assert load(Path("/dev/null"), env={}, demo=True)[0].node.role == "both"


def test_every_setting_is_described() -> None:
    for key, field in all_fields().items():
        assert field.description, key
        assert field.description.endswith("."), key
    assert all(section.__doc__ for section in config.sections().values())
    assert list(Config.model_fields) == list(config.sections())


def test_loading_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pdd.config_load import load; load(env={}, demo=True, search=False);"
        "heavy = ('torch', 'typer', 'starlette', 'textual', 'numpy', 'msgspec', 'asyncio');"
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert result.stdout.strip() == "[]"
