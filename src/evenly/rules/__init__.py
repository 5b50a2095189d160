"""How operations act on shards.

A rule looks at an operation's arguments and plans how each replica does its part: which operation, on which
operands, and what the results are together. It returns None where the parts cannot be put together so; then the
operands are gathered and the operation runs as it is. Knowing more rules makes things faster, never more right.

Rules know tensors by shape and :class:`Rows`, never by value, so a plan holds for every later call that looks the
same; nothing here knows of processes. :mod:`evenly.rules.table` says which operation follows which rule.
"""

from evenly.rules.plan import COMBINE, Call, Cut, Divided, Op, Operand, Parts, Plan, Rows, SizeOf
from evenly.rules.table import TABLE, plan, rule_of

__all__ = [
    "COMBINE",
    "TABLE",
    "Call",
    "Cut",
    "Divided",
    "Op",
    "Operand",
    "Parts",
    "Plan",
    "Rows",
    "SizeOf",
    "plan",
    "rule_of",
]
