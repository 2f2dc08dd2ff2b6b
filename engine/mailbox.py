"""What other threads leave for the serve loop: messages of the front, and calls to run between two steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from engine.wire import ToEngine


class Mailbox:
    """Any thread puts in, the loop's thread takes out."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._messages: deque[ToEngine] = deque()
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._closing = False

    def __len__(self) -> int:
        return len(self._messages)

    def post(self, message: ToEngine) -> None:
        """Leave a message of the front."""
        with self._wake:
            self._messages.append(message)
            self._wake.notify()

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Leave ``function`` to be run between two steps; cancelled when the loop ends first."""
        done: Future[None] = Future()
        with self._wake:
            if self._closing:
                done.cancel()
            else:
                self._calls.append((function, done))
                self._wake.notify()
        return done

    def close(self) -> None:
        """Wake the loop for the last time."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    # The loop's own thread.

    def wait(self, *, busy: Callable[[], bool]) -> bool:
        """Sleep until there is something here or ``busy``; False when the mailbox was closed."""
        with self._wake:
            while not (self._closing or self._calls or busy()):
                self._wake.wait()
        return not self._closing

    def run_calls(self) -> None:
        """Run the calls that are here now, in order."""
        for _ in range(len(self._calls)):
            function, done = self._calls.popleft()
            function()
            done.set_result(None)

    def messages(self) -> Iterator[ToEngine]:
        """Take the front's messages out, in order."""
        while self._messages:
            yield self._messages.popleft()

    def discard(self) -> None:
        """Forget the front's messages."""
        self._messages.clear()

    def cancel_calls(self) -> None:
        """Nobody will run them."""
        for _, done in self._calls:
            done.cancel()
