"""Tracebacks that cross from one process to another.

The places travel, the source lines do not: the driver looks them up, for only there are the cells of a
notebook known.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, TypeAlias

import torch

__all__ = ["Link", "Place", "Places", "chain_of", "render_chain", "users_line"]


@dataclass
class Place:
    """A frame of a traceback; columns are None before Python 3.11."""

    filename: str
    line: int
    function: str
    end_line: int | None = None
    column: int | None = None
    end_column: int | None = None


@dataclass
class Link:
    """One exception of a chain, as text; `leads_to` says how it is related to the next."""

    summary: str
    frames: list[Place]
    leads_to: str = ""


Line: TypeAlias = "tuple[CodeType, int]"
"""A line of a program, as cheaply as it can be noted: by its code, and its number."""


def users_line() -> Line:
    """The line of the user's program that is being carried out, below this library's and torch's own."""
    frame = innermost = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        users = _is_users.get(name)
        if users is None:
            users = _is_users[name] = not name.startswith(_NOT_THE_USERS)
        if users:
            break
        frame = frame.f_back
    frame = frame or innermost
    return frame.f_code, frame.f_lineno


class Places:
    """Places by number, the last few thousand of them."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, Line] | None] = [None] * _PLACES

    def note(self, number: int, line: Line) -> None:
        """Remember a place."""
        self._noted[number % _PLACES] = (number, line)

    def of(self, number: int) -> Place | None:
        """The place that was noted under ``number``, if that is not too long ago."""
        noted = self._noted[number % _PLACES]
        if noted is None or noted[0] != number:
            return None
        code, line = noted[1]
        return Place(code.co_filename, line, code.co_name)


_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
_PLACES = 4096
_is_users: dict[str, bool] = {}
"""Whether a file belongs to the user's program, by name: this is asked for every operation."""
_MACHINERY = str(Path(__file__).parents[1] / "_")[:-1]  # ends in a separator
_NOT_THE_USERS = (_MACHINERY, str(Path(torch.__file__).parent / "_")[:-1])


def chain_of(exc: BaseException) -> list[Link]:
    """The exception and what led to it, oldest first."""
    links: list[Link] = []
    seen: set[int] = set()
    relation, link = "", exc
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        summary = "".join(traceback.format_exception_only(type(link), link))
        links.append(Link(summary, _frames(link.__traceback__), relation))
        if link.__cause__ is not None:
            relation, link = _CAUSE, link.__cause__
        else:
            relation, link = _CONTEXT, None if link.__suppress_context__ else link.__context__
    return links[::-1]


def _frames(trace: TracebackType | None) -> list[Place]:
    """The frames of a traceback, without those by which Evenly came to call the user's code."""
    places: list[Place] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        place = Place(code.co_filename, trace.tb_lineno, code.co_name)
        positions: Callable[[], Iterable[tuple[int | None, ...]]] | None = getattr(code, "co_positions", None)
        if positions is not None and trace.tb_lasti >= 0:
            index = trace.tb_lasti // 2  # one position per instruction of two bytes
            found = next(itertools.islice(positions(), index, None), (None,) * 4)
            _, place.end_line, place.column, place.end_column = found
        places.append(place)
        trace = trace.tb_next
    users = list(itertools.dropwhile(lambda place: place.filename.startswith(_MACHINERY), places))
    return users or places


def render_chain(chain: Sequence[Link]) -> str:
    """Writes a chain as Python would, with the source lines that this process knows."""
    return "".join(map(_render, chain))


def _render(link: Link) -> str:
    frames: list[traceback.FrameSummary] = []
    for place in link.frames:
        linecache.checkcache(place.filename)
        columns: dict[str, Any] = {}
        if place.column is not None:
            columns = {"end_lineno": place.end_line, "colno": place.column, "end_colno": place.end_column}
        frames.append(traceback.FrameSummary(place.filename, place.line, place.function, **columns))
    return "".join(traceback.StackSummary.from_list(frames).format()) + link.summary + link.leads_to
