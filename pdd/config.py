"""The settings of a node: one frozen model, its sections, and what may change while a node runs.

A setting is `section.key`. `load` takes, strongest first: flags and `--set`, `PDD_SECTION__KEY` variables,
`conf.d/*.toml` beside the file (sorted), the file, the defaults below. It reports every mistake of all sources at
once. The `description` of each field is the text of etc/pdd.toml and of `pdd config schema`; man/pdd.toml.5 is
checked against the keys.

Not here: how values are written (config_types.py), reading of sources (config_sources.py), rules between settings
(config_rules.py), the loading itself (config_load.py), secrets (config_credentials.py).
"""

from __future__ import annotations

import socket
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pdd.config_types import (
    LARGEST_INT32,
    CompatNames,
    Duration,
    ListenAddress,
    Name,
    OptionalListenAddress,
    PeerAddresses,
    Provider,
    RequiredProvider,
    Size,
    Strings,
)

Role = Literal["prefill", "decode", "both"]


class Live:
    """Metadata of a setting that has one owner who can take a new value while the node runs: `pdd reload`. Here alone; the
    marks of etc/pdd.toml and pdd.toml(5), and what daemon/reload.py does, are held to it by tests."""


LIVE = Live()


def _hostname() -> str:
    return socket.gethostname().split(".")[0]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Node(Section):
    """Who this node is."""

    role: Role = Field(
        description="prefill: computes the KV of prompts for decoders. decode: serves clients, asks prefillers "
        "for the KV of prompts. both: does all of it alone. There is no default."
    )
    name: Name = Field(
        default_factory=_hostname, description="Name among peers and of the socket directory. Default: the host name."
    )


class Model(Section):
    """What is served."""

    path: str = Field(
        default="", description="Folder with config.json, *.safetensors and tokenizer files. Required unless --demo."
    )
    served_name: str = Field(default="", description="Name in the API. Empty: the last part of the path.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="Type of weights and KV. auto: as the checkpoint says."
    )
    max_context: int = Field(
        default=0, ge=0, le=LARGEST_INT32, description="Most tokens of prompt and answer together. 0: what the model allows."
    )


class Engine(Section):
    """The forward steps."""

    max_batch_size: int = Field(default=64, ge=1, le=4096, description="Most requests in one step.")
    max_batch_tokens: int = Field(
        default=2048, ge=1, le=1 << 20, description="Most tokens in one step: the chunk budget of prefill."
    )
    tp: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Rank processes that compute together, each with a part of the model and of the KV. It must divide the "
        "model's attention heads and MLP. Nodes that work together may differ.",
    )
    dp: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Replica groups: engines with weights, pages and queues of their own behind one API. A request goes to the "
        "one with most room. Not on a node that decoders ask for KV: run more prefillers instead.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="CPU threads of a rank. 0: the cores of its NUMA node, shared with its other ranks.",
    )
    step_timeout: Duration = Field(
        default=30.0, gt=0, description="A step that takes longer means a hung rank: the daemon exits 75."
    )

    @property
    def num_ranks(self) -> int:
        """Rank processes of the node, those of all groups."""
        return self.tp * self.dp


class Scheduler(Section):
    """Which request runs next, and which is refused."""

    max_queue: Annotated[int, LIVE] = Field(
        default=1024, ge=1, le=1_000_000, description="Requests that may wait; one more is answered 429."
    )
    queue_timeout: Annotated[Duration, LIVE] = Field(
        default=30.0,
        gt=0,
        description="Longest wait of a client's request for its first pages and place in the batch; then it is "
        "answered 504. Prefills for decoders wait as long as the decoder does.",
    )
    request_timeout: Annotated[Duration, LIVE] = Field(
        default=600.0,
        gt=0,
        description="Longest time without progress: from a request to its first token, or between two tokens; then "
        "it is answered 504. It does not bound the life of a request.",
    )
    local_prefill_tokens: Annotated[int, LIVE] = Field(
        default=0, ge=0, le=LARGEST_INT32, description="A decoder prefills prompts up to this many tokens itself. 0: never."
    )
    local_prefill_fallback: Annotated[bool, LIVE] = Field(
        default=False,
        description="Whether a decoder prefills itself when no prefiller can. false: such a request is answered 503. An answer "
        "that has begun is always carried on here.",
    )


class Kv(Section):
    """The pages of the KV cache."""

    page_size: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Token slots of a page. Two nodes that work together may differ; the smaller must divide the larger.",
    )
    num_pages: int = Field(
        default=0, ge=0, le=LARGEST_INT32, description="Pages of the pool of each group. 0: as many as memory_fraction allows."
    )
    memory_fraction: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="Share of the device's free memory for the pools of all groups, when num_pages is 0.",
    )


class Fabric(Section):
    """How KV travels between nodes."""

    provider: Provider = Field(
        default="auto",
        description="libfabric provider: auto, efa, verbs or tcp. auto: the best one present.",
    )
    library: str = Field(default="", description="Path of libfabric.so.1. Empty: the newest one found.")
    bind: Strings = Field(default=(), description="Local address or domain name per NIC. Empty: chosen.")
    require: RequiredProvider = Field(default="", description="Provider that must be in use, else the start fails. Empty: any.")
    local: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: between two nodes of one host and one user, KV is copied through memory that both see, "
        "unless fabric.require is set. off: it takes the fabric there, too.",
    )
    window_ops: int = Field(default=64, ge=1, le=65536, description="Writes in flight per peer and NIC.")
    window_bytes: Size = Field(default=8 << 20, ge=4096, description="Bytes in flight per peer and NIC.")
    idle: Literal["auto", "spin", "block"] = Field(
        default="auto", description="How a worker waits: auto spins shortly, then blocks."
    )


class Peers(Section):
    """Links between nodes."""

    listen: OptionalListenAddress = Field(
        default="",
        description="Address that decoders connect to. Required for role prefill, possible for both, nothing for decode.",
    )
    static: Annotated[PeerAddresses, LIVE] = Field(
        default=(),
        description="Prefillers that this decoder uses: a list of HOST:PORT. For role decode alone, which needs one "
        "unless scheduler.local_prefill_fallback is true.",
    )
    heartbeat: Duration = Field(default=0.5, gt=0, description="Time between two heartbeats on a link.")
    suspect_after: Duration = Field(default=1.5, gt=0, description="Silence after which a peer gets no new work.")
    dead_after: Duration = Field(
        default=5.0, gt=0, description="Silence after which the link is fenced and its work moved."
    )
    connect_timeout: Duration = Field(default=5.0, gt=0, description="Longest connect and handshake.")
    prefill_stall_timeout: Annotated[Duration, LIVE] = Field(
        default=30.0, gt=0, description="Longest time without progress of one prompt at a prefiller."
    )
    max_attempts: Annotated[int, LIVE] = Field(
        default=3, ge=1, le=100, description="Tries at the KV of one prompt before the request fails."
    )
    token_credential: str = Field(
        default="",
        description="File with the token that all peers share. A bare name is a systemd "
        "credential. Needed as soon as an address here is not loopback. A reload reads it again; links that are up stay.",
    )


class Api(Section):
    """The HTTP port: the OpenAI API on role decode and both, health and metrics on all."""

    listen: ListenAddress = Field(default="127.0.0.1:8000", description="Address of the port.")
    max_body: Size = Field(default=16 << 20, ge=1024, description="Largest request body.")
    max_connections: int = Field(
        default=0, ge=0, le=1_000_000,
        description="Most open connections. One more ends the longest idle one; when none is idle, it is answered 503. "
        "0: what the limit of open files leaves, at most 8192.",
    )
    api_keys_credential: str = Field(
        default="",
        description="File with API keys, one a line. A bare name is a systemd credential. "
        "Needed when the port is not loopback. A reload reads it again.",
    )
    tls_cert: str = Field(
        default="",
        description="File with the certificate chain, PEM; the port then speaks HTTPS alone. "
        "A bare name is a systemd credential.",
    )
    tls_key: str = Field(default="", description="File with the key of api.tls_cert, PEM, without a passphrase.")


class Metrics(Section):
    """What Prometheus scrapes at /metrics of the HTTP port."""

    compat: CompatNames = Field(
        default=(),
        description='Whose names are written beside pdd\'s own, for routers and dashboards: ["vllm"].',
    )


class Control(Section):
    """The two sockets of `pdd status` and its like."""

    dir: str = Field(
        default="",
        description="Directory that holds NAME/control.sock and NAME/status.sock. Empty: /run/pdd for root, "
        "else $XDG_RUNTIME_DIR/pdd.",
    )
    group: str = Field(default="", description="Group that may use control.sock. Empty: the daemon's own.")


class Log(Section):
    """Messages, on stderr."""

    level: Annotated[Literal["debug", "info", "warning", "error"], LIVE] = Field(
        default="info", description="Least level that is written."
    )
    format: Literal["auto", "text", "journal", "json"] = Field(
        default="auto", description="auto: journal under systemd, else text."
    )


class Drain(Section):
    """SIGTERM drains, then ends the daemon; `pdd drain` drains and leaves it running."""

    timeout: Annotated[Duration, LIVE] = Field(
        default=120.0, ge=0, description="Longest wait for running requests and pushes; then they are failed."
    )


class Top(Section):
    """`pdd top`."""

    interval: Duration = Field(default=1.0, ge=0.25, le=10, description="Time between two pictures, 250ms to 10s.")
    ascii: bool = Field(default=False, description="Draw with ASCII characters only.")
    theme: Literal["auto", "dark", "light"] = Field(default="auto", description="Colours. auto: the terminal's own.")


class Debug(Section):
    """For looking into a node."""

    show_prompts: Annotated[bool, LIVE] = Field(
        default=False, description="Whether `pdd requests show` prints the token ids of the prompt; they are kept for that."
    )
    allow_stacks: Annotated[bool, LIVE] = Field(
        default=True,
        description="Whether control.sock tells what the daemon's threads and tasks are doing. false where its group must "
        "not learn that.",
    )
    flight_memory: Size = Field(
        default=32 << 20, ge=4 << 20, le=64 << 20,
        description="Memory of the flight recorder, at most half of it for writes and a quarter for states of requests, 4MiB "
        "to 64MiB; the latest states of the whole node take 2 to 5 MB, whatever is set. More remembers longer: what is enough "
        "depends on the rate of requests.",
    )


class Config(Section):
    """All settings of a node."""

    node: Node
    model: Model = Model()
    engine: Engine = Engine()
    scheduler: Scheduler = Scheduler()
    kv: Kv = Kv()
    fabric: Fabric = Fabric()
    peers: Peers = Peers()
    api: Api = Api()
    metrics: Metrics = Metrics()
    control: Control = Control()
    log: Log = Log()
    drain: Drain = Drain()
    top: Top = Top()
    debug: Debug = Debug()


def sections() -> dict[str, type[Section]]:
    """Name → class of every section, in the order of the file."""
    return {name: field.annotation for name, field in Config.model_fields.items()}  # type: ignore[misc]


def all_fields() -> dict[str, Any]:
    """`section.key` → pydantic field of every setting, in the order of the file."""
    return {
        f"{section}.{key}": field for section, model in sections().items() for key, field in model.model_fields.items()
    }


def values(config: Config) -> dict[str, Any]:
    """`section.key` → value, in the order of the file."""
    return {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in all_fields()}


def is_live(field: Any) -> bool:
    """Whether a running node takes a new value of it."""
    return any(isinstance(item, Live) for item in field.metadata)
