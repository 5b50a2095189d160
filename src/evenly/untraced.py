"""Code that ``torch.compile`` must leave alone, whoever calls it: it talks to other processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

# Torch's own way, torch.compiler.disable, imports the compiler: two seconds, for nothing where nobody compiles.
_eval_frame: Any = cast("Any", torch._C)._dynamo.eval_frame

_REASON = (
    "evenly.DataParallel runs in several processes, where a compiler cannot follow it: compile the module in it, "
    "DataParallel(torch.compile(module))"
)


def untraced(function: _F) -> _F:
    """Have a function and all that it calls run as they are, in a compiled caller, too."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = _eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _eval_frame.set_eval_frame(before)

    marked = cast("Any", run)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    _skip(marked.__code__)
    return marked


def _skip(code: Any) -> None:
    """Keep the compiler from looking at one function's own code."""
    if hasattr(_eval_frame, "skip_code"):  # before PyTorch 2.7
        _eval_frame.skip_code(code)
        return
    action = _eval_frame._FrameAction
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
