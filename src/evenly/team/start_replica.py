"""Where a replica's process begins: takes over the driver's import path, then becomes a replica.

Run as a file, not with ``-m``: the package may be importable only through the driver's own ``sys.path``, and nothing
in the current directory must get in the way of that.
"""

from __future__ import annotations

import os
import sys

# This file's folder, whose module names are no top-level names (it is not there with -I or -P).
if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):  # noqa: PTH100, PTH120
    del sys.path[0]

_POLL_MILLISECONDS = 500


def _start() -> None:
    settings, sock, memory, last_words, index, count, driver = (int(argument) for argument in sys.argv[1:8])
    try:
        _end_with(driver)  # before the imports, which take seconds
        import json

        with os.fdopen(settings, "rb") as file:
            # Modules that look at the arguments when they are imported shall see the program's.
            sys.path[:], sys.argv[:] = json.load(file)
        from evenly.team.serve import main
    except BaseException:
        import traceback

        os.write(last_words, traceback.format_exc().encode())
        os._exit(1)
    main(sock, memory, last_words, index, count)


def _end_with(driver: int) -> None:
    """End this process when the driver, its parent, is gone, whatever this process is doing at the time.

    A closed socket alone would not do: forked children of the driver may hold the other end open.
    """
    import select
    import signal
    import threading

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

    threading.Thread(target=wait, name="evenly-end-with-driver", daemon=True).start()


_start()
