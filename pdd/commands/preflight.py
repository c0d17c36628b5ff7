"""What the settings name on this machine, looked at before anything starts: model folder, credential files, certificate,
libfabric, NICs, group. `serve` refuses what is wrong, `config check` prints it.

Reads names, headers and modes, opens no device and listens nowhere. A setting that is itself wrong is not looked at: it
comes here with its default.
"""

from __future__ import annotations

import dataclasses
import errno
import grp
import importlib
import os
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pdd.api.tls import server_context
from pdd.config import Api, Config
from pdd.config_credentials import credential_path, read_credential, tls_files
from pdd.config_load import ConfigProblems, Origins, reading_order
from pdd.config_sources import Origin, Problem
from pdd.errors import ConfigError, ModelError
from pdd.model.config import load_config
from pdd.model.folder import check_context, check_folder
from pdd.model.tensor_parallel import check_tp
from pdd.units import counted

_Report = Callable[..., None]  # (key, message, hint="", warning=False, id="E780", index=None)
_NAMES_OF_NICS = ("/sys/class/infiniband", "/sys/class/net")


def problems(config: Config, origins: Origins, *, demo: bool = False, starting: bool = False) -> list[Problem]:
    """Everything that is wrong, in reading order.

    Args:
        demo: the model's folder is not used.
        starting: this process is the node; else a credential that only systemd hands to the node is passed over.
    """
    found: list[Problem] = []

    def report(key: str, message: str, hint: str = "", warning: bool = False, id: str = ConfigError.id,
               index: int | None = None) -> None:
        problem = Problem.at(origins.get(key, Origin("default")), key, message, index=index)
        level: Literal["error", "warning"] = "warning" if warning else "error"
        found.append(dataclasses.replace(problem, hint=hint, level=level, id=id))

    if config.model.path and not demo:
        _look_at_model(Path(config.model.path), config, report)
    if (most := len(os.sched_getaffinity(0))) < config.engine.num_ranks:
        report("engine.tp" if config.engine.tp > 1 else "engine.dp",
               f"{config.engine.num_ranks} ranks share the {counted(most, 'CPU')} that this process may use", warning=True)
    for key, name in (("peers.token_credential", config.peers.token_credential),
                      ("api.api_keys_credential", config.api.api_keys_credential)):
        _look_at_credential(key, name, starting, report)
    _look_at_certificate(config.api, starting, report)
    if config.fabric.library:
        _look_at_library(config.fabric.library, report)
    for index, place in enumerate(config.fabric.bind):
        _look_at_nic(place, index, report)
    if config.control.group:
        try:
            grp.getgrnam(config.control.group)
        except KeyError:
            report("control.group", f"there is no group {config.control.group}", "`groupadd --system` makes one.")
    return sorted(found, key=reading_order)


def refuse(found: Sequence[Problem]) -> None:
    """Returns when a node can start in spite of `found`.

    Raises:
        ModelError: the model is all that is wrong.
        ConfigProblems: anything else is; says all of it.
    """
    wrong = [problem for problem in found if problem.level == "error"]
    if len(wrong) == 1 and wrong[0].id == ModelError.id:
        raise ModelError(f"{wrong[0].key}: {wrong[0].message}", hint=wrong[0].hint)
    if wrong:
        raise ConfigProblems(wrong)


def _look_at_model(folder: Path, config: Config, report: _Report) -> None:
    try:
        allowed = check_folder(folder)
    except ModelError as error:
        report("model.path", error.message, error.hint, id=error.id)
        return
    try:
        check_context(config.model.max_context, allowed)
    except ConfigError as error:
        report("model.max_context", error.message, error.hint)
    try:
        check_tp(load_config(folder), config.engine.tp)
    except ConfigError as error:
        report("engine.tp", error.message, error.hint)


def _look_at_credential(key: str, name: str, starting: bool, report: _Report) -> None:
    if not name:
        return
    path = credential_path(name)
    by_systemd = "/" not in name and "CREDENTIALS_DIRECTORY" not in os.environ
    if by_systemd and not starting and not path.exists():
        return
    try:
        read_credential(name, key)
        mode = stat.S_IMODE(path.stat().st_mode)
    except ConfigProblems as error:
        more = "; a bare name is a credential of systemd, which did not start this" if by_systemd else ""
        report(key, error.problems[0].message + more)
        return
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        may = "read" if mode & stat.S_IROTH else "written"
        report(key, f"{path} can be {may} by every user (mode {mode:04o})", "`chmod 600` it.", warning=True)


def _look_at_certificate(api: Api, starting: bool, report: _Report) -> None:
    files = tls_files(api)
    if files is None:
        return
    by_systemd = "/" not in api.tls_cert or "/" not in (api.tls_key or "/")
    if by_systemd and "CREDENTIALS_DIRECTORY" not in os.environ and not starting:
        return
    try:
        server_context(*files)
    except ConfigError as error:
        report("api.tls_cert", error.message, error.hint)
        return
    secret = files[1] or files[0]
    if stat.S_IMODE(secret.stat().st_mode) & stat.S_IROTH:
        report("api.tls_key", f"{secret} can be read by every user", "`chmod 600` it.", warning=True)


def _look_at_library(path: str, report: _Report) -> None:
    """Loads it, as a start would; without the native core, which a client may lack, it must only be there."""
    try:
        native = importlib.import_module("pdd.fabric._native")
    except ImportError:
        if "/" in path and not Path(path).exists():
            report("fabric.library", f"{path} does not exist")
        return
    try:
        native.library(path)
    except native.FabricError as error:
        report("fabric.library", " ".join(str(error).split()))


def _look_at_nic(place: str, index: int, report: _Report) -> None:
    """An address that this machine has, or a NIC as libfabric may call it: its name, alone or with an ending."""
    try:
        host = socket.getaddrinfo(place, None, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        names = [name for folder in _NAMES_OF_NICS if Path(folder).is_dir() for name in os.listdir(folder)]
        if not any(place == name or place.startswith(f"{name}-") for name in names):
            report("fabric.bind", f"this machine has no NIC {place}", "`pdd topology` shows the NICs.", index=index)
        return
    family, kind, _, _, address = host[0]
    try:
        with socket.socket(family, kind) as probe:
            probe.bind(address)  # of any port, for a moment, and without listening
    except OSError as error:
        why = "is no address of this machine" if error.errno == errno.EADDRNOTAVAIL else f"cannot be used: {error.strerror}"
        report("fabric.bind", f"{place} {why}", "`ip address` lists its addresses.", index=index)
