"""The commands and their options, as Typer knows them. Thin: a body imports what it needs when it runs.

`pdd --help` lists commands in the order in which the modules below are imported.
"""

# ruff: noqa: I001  the order is the help's
from pdd.commands.tree.base import app
from pdd.commands.tree import run
from pdd.commands.tree import machine
from pdd.commands.tree import act
from pdd.commands.tree import watch
from pdd.commands.tree import settings
from pdd.commands.tree import models
from pdd.commands.tree import bench

__all__ = ["act", "app", "bench", "machine", "models", "run", "settings", "watch"]
