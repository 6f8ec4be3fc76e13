"""Threads that own a database connection and run operations in groups; answers go to event loops.

An operation is a function of the connection. It runs in the thread, in the order in which it was
put; its answer is told only when the group's `run` says so, which for a writer is after the commit.
Bounded: beyond `QUEUED` waiting operations the store says it is busy. Knows no database library.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from scheduler.errors import StoreFault

if TYPE_CHECKING:
    from typing import Protocol

    class Connection(Protocol):
        """What a lane needs of a connection."""

        def close(self) -> None:
            """Nothing of it is left."""
            ...


T = TypeVar("T")
C = TypeVar("C", bound="Connection")

GROUP = 128
"""Operations in one commit at most."""
QUEUED = 20_000
"""Operations waiting for a thread at most; beyond it the store says it is busy."""


class Lane(Generic[C]):
    """A thread with a connection, which runs operations in groups.

    Args:
        name: Of the thread.
        connect: Opens the connection, inside the thread.
        run: Runs a group of (operation, answer); must answer each.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], C],
        run: Callable[[C, list[Job[C]]], None],
    ) -> None:
        self._jobs: deque[Job[C]] = deque()
        self._ready = threading.Condition()
        self._closing = False
        self._connect = connect
        self._run = run
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job[C]) -> None:
        """The job will be answered.

        Raises:
            StoreFault: Closed, or too much is waiting.
        """
        with self._ready:
            if self._closing:
                raise StoreFault("the store is closed")
            if len(self._jobs) >= QUEUED:
                raise StoreFault(f"the store is busy: {QUEUED} operations wait")
            self._jobs.append(job)
            self._ready.notify()

    async def ask(self, operation: Callable[[C], T]) -> T:
        """What the operation returns, once it is committed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self.put(Job(operation, future, loop))
        return await future

    def close(self) -> None:
        """What was put is answered, and the thread has ended."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join()

    def _main(self) -> None:
        connection = self._connect()
        try:
            while True:
                with self._ready:
                    while not self._jobs and not self._closing:
                        self._ready.wait()
                    if not self._jobs:
                        return
                    jobs = [self._jobs.popleft() for _ in range(min(GROUP, len(self._jobs)))]
                self._run(connection, jobs)
        finally:
            connection.close()


class Job(Generic[C]):
    """An operation and who waits for it; `future` is None where nobody does."""

    __slots__ = ("_error", "_future", "_loop", "_value", "operation")

    def __init__(
        self,
        operation: Callable[[C], Any],
        future: asyncio.Future[Any] | None,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self.operation = operation
        self._future = future
        self._loop = loop
        self._value: Any = None
        self._error: Exception | None = None

    def worked(self, value: Any) -> None:  # noqa: ANN401 - whatever the operation returns
        """To be answered so, after the commit."""
        self._value, self._error = value, None

    def failed(self, error: Exception) -> None:
        """To be answered so."""
        self._value = None
        self._error = error

    def answer(self) -> None:
        """The waiting task goes on, in its own loop; one that left is not missed."""
        if self._loop is None or self._future is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        future = self._future
        if future is None or future.done():
            return
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._value)
