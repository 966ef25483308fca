"""When vLLM's engine process was asked to stop, for an end in order under ``--shutdown-timeout``.

vLLM tells connectors nothing before it ends the workers. It finishes running requests first, and
then goes on stepping only as long as a connector says that work is pending. So the time of the
signal is noted here, in front of vLLM's own handler, which then runs as before.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType


class ShutdownNotice:
    """The moment of the first SIGTERM or SIGINT of this process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._is_armed = False
        self.asked_s: float | None = None
        """None while nobody has asked."""

    def arm(self) -> None:
        """Listen from now on; idempotent.

        Called with the first request: vLLM 0.23 sets its handlers after it has built connectors.
        Where vLLM runs inside of another program, in a thread or without handlers, there is nothing
        to note: that program ends vLLM by a call.
        """
        if self._is_armed:
            return
        self._is_armed = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler) and handler is not signal.default_int_handler:
                signal.signal(number, self._noting(handler))

    def _noting(
        self, handler: Callable[[int, FrameType | None], object]
    ) -> Callable[[int, FrameType | None], None]:
        def note(number: int, frame: FrameType | None) -> None:
            if self.asked_s is None:
                self.asked_s = self._clock()
            handler(number, frame)

        return note
