"""Where a replica's process begins: takes over the driver's import path, then becomes a replica.

Run as a file, not with ``-m``: the package may be importable only through the driver's own ``sys.path``, and nothing
in the current directory must get in the way of that.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this file's folder, whose module names are no top-level names


def _start() -> None:
    import json
    import os

    settings, *numbers = (int(argument) for argument in sys.argv[1:7])
    with os.fdopen(settings, "rb") as file:
        sys.path[:] = json.load(file)
    from evenly.team.replica import main

    sock, memory, last_words, index, count = numbers
    main(sock, memory, last_words, index, count, int(sys.argv[7]))


_start()
