"""Where every Python thread of the daemon is, and every task of its main loop: file, line and function, no values."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Iterable
from types import FrameType

from pdd.control import schema

_MOST_TASKS = 256
_MOST_FRAMES = 64


def document() -> schema.Stacks:
    """Of any thread; tasks only where that is the main loop's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = [
        schema.ThreadStack(name=names.get(ident, f"thread {ident}"), frames=_frames(_of_thread(frame)))
        for ident, frame in sys._current_frames().items()
    ]
    return schema.Stacks(pid=os.getpid(), threads=tuple(threads), tasks=_tasks())


def _tasks() -> tuple[schema.ThreadStack, ...]:
    try:
        tasks = list(asyncio.all_tasks())
    except RuntimeError:  # not on the loop's thread
        return ()
    return tuple(
        schema.ThreadStack(name=task.get_name(), frames=_frames(_of_task(task))) for task in tasks[:_MOST_TASKS]
    )


def _of_thread(frame: FrameType) -> Iterable[tuple[str, int, str]]:
    for each, line in reversed(list(traceback.walk_stack(frame))):
        yield each.f_code.co_filename, line, each.f_code.co_qualname


def _of_task(task: asyncio.Task[object]) -> Iterable[tuple[str, int, str]]:
    for frame in task.get_stack(limit=_MOST_FRAMES):
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname


def _frames(found: Iterable[tuple[str, int, str]]) -> tuple[str, ...]:
    return tuple(f"{path}:{line} {function}" for path, line, function in list(found)[-_MOST_FRAMES:])
