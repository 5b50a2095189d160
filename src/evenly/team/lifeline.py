"""No replica outlives its driver, however that ends.

This module imports nothing that takes time: it must be at work before torch is imported.
"""

from __future__ import annotations

import os
import select
import signal
import threading

_POLL_MILLISECONDS = 500


def end_with_driver(driver: int) -> None:
    """End this process when the driver is gone, whatever this process is doing at the time.

    A closed socket alone would not do: forked children of the driver may hold the other end open.

    Args:
        driver: Its process id; it is the parent of this process.
    """
    try:
        descriptor = os.pidfd_open(driver)
    except OSError:  # an old kernel, or it is gone already
        descriptor = -1

    def wait() -> None:
        poll = select.poll()
        if descriptor >= 0:
            poll.register(descriptor, select.POLLIN)
        while os.getppid() == driver:
            poll.poll(None if descriptor >= 0 else _POLL_MILLISECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="evenly-lifeline", daemon=True).start()
