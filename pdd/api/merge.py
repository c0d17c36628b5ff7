"""Several choices as one sequence of deltas, each choice pulled by a task of its own.

Nothing is read ahead beyond a few deltas: a consumer that does not ask stops the tasks from asking. When the consumer
stops iterating, for whatever reason, every choice is closed before `merge` returns, which aborts what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from pdd.api.choice import Delta
from pdd.api.connection import stopped

_Item = Delta | BaseException | None  # None: one choice is complete
_READ_AHEAD = 4  # deltas; enough that n choices of one step do not wait for each other


async def merge(choices: Sequence[AsyncGenerator[Delta, None]], stop: asyncio.Event) -> AsyncGenerator[Delta, None]:
    """Deltas of all `choices`, in order within each. The first failure of one ends all.

    Raises:
        PddError: of a choice.
        Draining: `stop` was set, because the node goes down now.
    """
    queue: asyncio.Queue[_Item] = asyncio.Queue(_READ_AHEAD)
    tasks = [asyncio.create_task(_pump(choice, queue)) for choice in choices]
    tasks.append(asyncio.create_task(_watch(stop, queue)))
    try:
        running = len(choices)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(choice: AsyncGenerator[Delta, None], queue: asyncio.Queue[_Item]) -> None:
    try:
        async with aclosing(choice):
            async for delta in choice:
                await queue.put(delta)
    except Exception as error:  # carried to the consumer, who raises it
        await queue.put(error)
    else:
        await queue.put(None)


async def _watch(stop: asyncio.Event, queue: asyncio.Queue[_Item]) -> None:
    await queue.put(await stopped(stop))
