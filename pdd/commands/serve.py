"""serve: from flags and files to a config, then into the daemon."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pdd import config_load, config_sources, log, log_ring, open_files
from pdd.commands import preflight
from pdd.commands.common import Globals, print_json, require_native
from pdd.commands.configure import toml_text
from pdd.config import Config, all_fields, values
from pdd.errors import EXIT_BUG, HOW_TO_INSTALL, NotInstalled, PddError, UsageError, no_space
from pdd.version import VERSION

_FLAG_KEYS = {
    "--role": "node.role",
    "--name": "node.name",
    "--model": "model.path",
    "--tp": "engine.tp",
    "--listen": "api.listen",
    "--peer-listen": "peers.listen",
    "--peer": "peers.static",
    "--dp": "engine.dp",
}


def serve(options: Globals, flags: Mapping[str, Any], assignments: Sequence[str], demo: bool, dry_run: bool) -> int:
    """Runs the node; the exit code. `flags`: flag → value, None where it was not given."""
    given = {flag: value for flag, value in flags.items() if value is not None}
    if options.instance is not None:
        given.setdefault("--name", options.instance)
    settings = [config_sources.from_flag(_FLAG_KEYS[flag], value, flag) for flag, value in given.items()]
    if options.run_dir is not None:
        settings.append(config_sources.from_flag("control.dir", str(options.run_dir), "--run-dir"))
    if options.verbose:
        settings.append(config_sources.from_flag("log.level", "debug", "-v"))
    if options.json:
        settings.append(config_sources.from_flag("log.format", "json", "--json"))

    def read() -> tuple[Config, config_load.Origins, list[config_sources.Problem]]:
        config, origins = config_load.load(options.config, flags=settings, assignments=assignments, demo=demo)
        if demo and origins["model.path"].kind == "flag":
            raise UsageError("--demo makes a model of its own: give either that or --model DIR",
                             hint="See `pdd serve --help`.")
        problems = preflight.problems(config, origins, demo=demo, starting=True)
        preflight.refuse(problems)
        return config, origins, problems

    config, origins, problems = read()
    _check_installation()
    open_files.raise_limit(config)
    if dry_run:
        _show(options, config, origins, demo)
        return 0
    log.setup(config.log.level, config.log.format)
    log_ring.attach()
    for problem in problems:
        logging.getLogger("pdd").warning("%s", problem)
    if demo and config.model.path:
        logging.getLogger("pdd").warning("--demo: model.path (%s) is not used", origins["model.path"])
    from pdd.daemon.main import run

    try:
        return int(run(config, origins, demo=demo, reread=lambda: read()[:2]))
    except PddError:
        raise
    except Exception as error:
        if (full := no_space(error)) is not None:
            raise full from error
        logging.getLogger("pdd").exception("the daemon ended by a bug [E001]")
        return EXIT_BUG


def _check_installation() -> None:
    """Told before anything is bound, and once: else each rank would find out by itself.

    Raises:
        NotInstalled: what a node needs beside this client is not there.
    """
    require_native()
    if importlib.util.find_spec("torch") is None:
        raise NotInstalled("a node needs torch, which is not installed", hint=HOW_TO_INSTALL)


def _show(options: Globals, config: Config, origins: config_load.Origins, demo: bool) -> None:
    """What would run."""
    if options.json:
        print_json(config_load.explained(config, origins))
        return
    found = values(config)
    print(f"pdd {VERSION} {config.node.role} {config.node.name}  model {'(demo)' if demo else config.model.path}")
    for key, field in all_fields().items():
        if origins[key].kind != "default":
            unused = "; not used: --demo" if demo and key == "model.path" else ""
            print(f"  {key} = {toml_text(field, found[key])}  # {origins[key]}{unused}")
