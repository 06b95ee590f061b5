"""What is accepted on the command line: the words that several commands take, read or refused by name.

Owns reading an id, a length of time and a moment, the arguments and options that more than one command has, and who is
asked what a shell may complete them with. What is particular to one command stands with it in `cli`.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from brainlaned.wire import format_time, parse_time

AGE_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def job_id(word: str) -> int:
    """Read the id of a job."""
    if not re.fullmatch("[1-9][0-9]{0,17}", word):
        raise typer.BadParameter(f"'{word}' is not the id of a job (1, 2, 3, ...)")
    return int(word)


def seconds(word: str) -> float:
    """Read a length of time in seconds."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", word):
        raise typer.BadParameter(f"'{word}' is not a number of seconds")
    return float(word)


def moment(word: str) -> str:
    """Read a moment, as the wire writes it or as an age (2h: two hours ago), and return it as the wire writes it."""
    age = re.fullmatch(r"([0-9]{1,9})([smhdw])", word)
    try:
        if age is None:
            return format_time(parse_time(word))
        return format_time(datetime.now(UTC) - timedelta(**{AGE_UNITS[age[2]]: int(age[1])}))
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"'{word}' is neither an age (30m, 2h, 7d) nor a time with its offset (2026-01-31T22:00:00Z)"
        ) from None


# What a shell asks for while a command line is being typed; who answers is loaded only then.


def complete_job(ctx: typer.Context) -> list[tuple[str, str]]:
    """Return ids of jobs that the command can do something with."""
    from . import completion

    return completion.jobs(ctx)


def complete_route(ctx: typer.Context) -> list[tuple[str, str]]:
    """Return the lane's routes."""
    from . import completion

    return completion.routes(ctx)


JobId = Annotated[
    int,
    typer.Argument(metavar="ID", parser=job_id, help="The job's id.", show_default=False, autocompletion=complete_job),
]
JobIds = Annotated[
    list[int],
    typer.Argument(
        metavar="ID...", parser=job_id, help="Ids of jobs.", show_default=False, autocompletion=complete_job
    ),
]
HeldJobId = Annotated[
    int | None,
    typer.Argument(
        metavar="[ID]", parser=job_id, help="The held job.", show_default=False, autocompletion=complete_job
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="S", parser=seconds, help="Stop waiting after S seconds (exit 7); the job goes on."
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Do not escape control characters on a terminal.")]
