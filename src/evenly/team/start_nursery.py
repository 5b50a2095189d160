"""Where a nursery in a fresh interpreter begins: takes over the driver's import path, then imports torch.

Run as a file, not with ``-m``: the package may be importable only through the driver's own ``sys.path``, and nothing
in the current directory must get in the way of that.
"""

from __future__ import annotations

import os
import sys

# This file's folder, whose module names are no top-level names (it is not there with -I or -P).
if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):  # noqa: PTH100, PTH120
    del sys.path[0]

# All that is needed to say what went wrong: the driver's path may lead nowhere.
import marshal
import socket
import struct
import traceback


def _start() -> None:
    line, settings, driver, pid = (int(argument) for argument in sys.argv[1:5])
    # Whoever waits for this process goes on now. The nursery is nobody's child: a program that waits for its children
    # shall not meet one that it knows nothing of.
    if os.fork():
        os._exit(0)
    try:
        content = os.pread(settings, os.fstat(settings).st_size, 0)
        os.close(settings)
        # Modules that look at the arguments when they are imported shall see the program's.
        sys.path[:], sys.argv[:] = marshal.loads(content)[:2]  # noqa: S302 - the driver's own
        from evenly.team.nurse import Nurse
    except BaseException:
        _refuse_all(line, traceback.format_exc())
    else:
        Nurse(line, driver, pid).run()


def _refuse_all(line: int, failure: str) -> None:
    """Have every replica that is asked for say why it cannot be."""
    with socket.socket(fileno=line) as orders:
        while True:
            message, descriptors, _, _ = socket.recv_fds(orders, 64, 16)
            if not message:
                os._exit(1)
            life, _, _, last_words = descriptors[:4]
            os.write(last_words, failure.encode())
            os.write(life, struct.pack("<i?i", os.getpid(), True, 1))  # as `nursery.NEWS`
            for descriptor in descriptors:
                os.close(descriptor)


_start()
