"""What the daemon is doing: the Python stacks of its threads and of its asyncio tasks, as text. Functions and lines, no values.

It runs on the main loop, so it tells nothing of a loop that is stuck: for that there is SIGABRT, which systemd's watchdog
sends and `faulthandler` answers on stderr.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from types import FrameType

_DEEPEST = 40  # frames of one stack
_MOST_TASKS = 1000


def text() -> str:
    """Of all threads, then of all tasks, by name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = [f"thread {names.get(ident, ident)}\n{_stack(frame)}" for ident, frame in sys._current_frames().items()]
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    shown = [f"task {task.get_name()}\n{_task(task)}" for task in tasks[:_MOST_TASKS]]
    left = [f"{len(tasks) - _MOST_TASKS} more tasks\n"] if len(tasks) > _MOST_TASKS else []
    return "\n".join([*threads, *shown, *left])


def _stack(frame: FrameType) -> str:
    return "".join(traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_DEEPEST, lookup_lines=False).format())


def _task(task: asyncio.Task[object]) -> str:
    places = [(frame.f_code, frame.f_lineno) for frame in task.get_stack(limit=_DEEPEST)]
    return "".join(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n' for code, line in places)
