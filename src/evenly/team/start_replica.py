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


def _start() -> None:
    settings, sock, memory, last_words, index, count, parent = (int(argument) for argument in sys.argv[1:8])
    import json

    try:
        with os.fdopen(settings, "rb") as file:
            # Modules that look at the arguments when they are imported shall see the program's.
            sys.path[:], sys.argv[:] = json.load(file)
        from evenly.team.lifeline import end_with_driver

        end_with_driver(parent)
        from evenly.team.replica import main
    except BaseException:
        import traceback

        os.write(last_words, traceback.format_exc().encode())
        os._exit(1)
    main(sock, memory, last_words, index, count)


_start()
