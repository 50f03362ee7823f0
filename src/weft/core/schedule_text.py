"""Schedules as text, readable by people and by ``torch.distributed.pipelining``.

One line per worker, its actions separated by commas. Empty cells are bubbles and only please the eye:

    0F0,0F1,   ,0B0,0B1            stage 0 on worker 0
       ,1F0,1B0,1F1,1B1            stage 1 on worker 1

This is the format of PyTorch's CSV tables, both "compute_only" and "compute_comms". Two things of theirs are
simplified: ``(0F0;1B0)OVERLAP_F_B`` becomes its parts, one after the other; and sends, receives, (un)sharding,
reduction of gradients, and (from PyTorch 2.15 on) waits for them are dropped, because weft derives transfers from the
routes.
"""

import re
from collections.abc import Iterator

from .errors import ScheduleError, listed
from .schedule_action import Action, Table

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_DROPPED = re.compile(r"\d+((WAIT_)?(REDUCE_GRAD|SEND_F|SEND_B)|RECV_F|RECV_B|UNSHARD|RESHARD)\d*", re.ASCII)
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def looks_like_table(text: str) -> bool:
    """Is this meant as a table, rather than as the name of a schedule?"""
    return "," in text or "\n" in text.strip() or _ACTION.fullmatch(text.strip()) is not None


def parse_table(text: str) -> Table:
    """Read a table. Lines of white space are skipped; whether the table makes sense is not asked.

    Raises ScheduleError, which lists every cell that is no action.
    """
    faults: list[str] = []
    lines = [line for line in text.splitlines() if line.strip()]
    table = tuple(tuple(_actions(worker, line, faults)) for worker, line in enumerate(lines))
    if faults:
        headline = "the table cannot be read; an action is a stage, F, B, I or W, and a micro-batch: 2F0"
        raise ScheduleError(listed(headline, faults))
    return table


def table_text(table: Table) -> str:
    """Write a table, without bubbles; every line ends with a line feed."""
    return "".join(",".join(map(str, row)) + "\n" for row in table)


def _actions(worker: int, line: str, faults: list[str]) -> Iterator[Action]:
    for column, cell in enumerate(line.split(",")):
        overlap = _OVERLAP.fullmatch(cell.strip())
        for part in overlap[1].split(";") if overlap else [cell]:
            if match := _ACTION.fullmatch(part.strip()):
                yield Action(int(match[1]), match[2], int(match[3]))
            elif part.strip() and not _DROPPED.fullmatch(part.strip()):
                faults.append(f"worker {worker}, cell {column}: {part.strip()!r} is no action")
