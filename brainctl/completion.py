"""What a shell offers while a command line is being typed: ids of jobs, and routes, as the lane knows them now.

Asked between two keys, so it is quick or silent: a lane that is away, slow or closed to the caller gives no words, and
whatever goes wrong is for the command itself to tell.
"""

import time
from collections.abc import Mapping
from typing import Any

import typer

from brainlaned.wire import Status

from . import render
from .client import Lane
from .errors import Problem
from .session import Session

ANSWER_WITHIN_S = 1.0
"""For all that is asked of the lane together."""
MAX_OFFERED = 30

OVER = (Status.DONE, Status.FAILED, Status.CANCELLED)

STATUSES: dict[str, tuple[Status | None, ...]] = {
    "show": (None,),
    "output": (Status.DONE,),
    "follow": (Status.RUNNING, Status.QUEUED),
    "wait": (Status.RUNNING, Status.QUEUED),
    "cancel": (Status.RUNNING, Status.QUEUED, Status.HELD),
    "retry": (Status.FAILED,),
    "recover": (Status.HELD,),
    "forget": OVER,
}
"""Where a job stands with which the command can do something; None: anywhere."""

WITH_VALUE = ("--socket", "--lane", "--answer-within")
"""What stands before the verb and takes a word."""

ZSH_SCRIPT = """\
#compdef %(prog_name)s

%(complete_func)s() {
  eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" %(autocomplete_var)s=complete_zsh %(prog_name)s)
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  %(complete_func)s "$@"
else
  compdef %(complete_func)s %(prog_name)s
fi
"""
"""Its first line is where zsh looks for what it is for; and read for the first time, it has words to offer already."""

Json = dict[str, Any]


def jobs(ctx: typer.Context) -> list[tuple[str, str]]:
    """Return the latest jobs for the command that is typed, with where they stand."""
    deadline = time.monotonic() + ANSWER_WITHIN_S
    found: list[Json] = []
    try:
        lane = _lane(ctx, deadline)
        for status in STATUSES.get(ctx.info_name or "", ()):
            found += lane.list(status=status, limit=MAX_OFFERED).object()["jobs"]
            lane.answer_within_s = max(0.0, deadline - time.monotonic())
        wanted = [job for job in found if ctx.info_name not in ("output", "forget") or not job["erased_at"]]
        latest = sorted(wanted, key=lambda job: job["id"], reverse=True)[:MAX_OFFERED]
        return [(str(job["id"]), f"{render.shown(job['status'])}, {render.why(job)}") for job in latest]
    except (Problem, LookupError, TypeError):
        return []


def routes(ctx: typer.Context) -> list[tuple[str, str]]:
    """Return the lane's routes, with whether they are open."""
    try:
        found = _lane(ctx, time.monotonic() + ANSWER_WITHIN_S).status().object()["routes"]
        return [
            (route["route"], "open" if route["open"] else f"closed, {render.shown(route['reason'])}")
            for route in found
            if render.shown(route["route"]) == route["route"]
        ]
    except (Problem, LookupError, TypeError):
        return []


def _lane(ctx: typer.Context, deadline: float) -> Lane:
    outer = ctx.find_root()
    session = Session([])
    source = outer.get_parameter_source("socket")
    session.choose(
        outer.params.get("socket"),
        outer.params.get("lane"),
        by_hand=source is not None and source.name == "COMMANDLINE",
    )
    session.answer_within_s = max(0.0, deadline - time.monotonic())
    return session.lane()


def mend_typer() -> None:
    """Have Typer write a script for zsh that zsh finds, and keep it from loading rich.

    Rich would take its marks out of our help, which has none, and takes longer than asking the lane.
    """
    from typer import _completion_classes as classes

    if hasattr(classes, "_sanitize_help_text"):
        classes._sanitize_help_text = str  # type: ignore[assignment]
    classes.ZshComplete.source_template = ZSH_SCRIPT


def typed_verb(environment: Mapping[str, str]) -> str | None:
    """Return the verb on the line so far, of whichever shell; None: it is still to come or may go on."""
    line = environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS") or ""
    words = line.split()[1:]
    complete = iter(words if line[-1:].isspace() else words[:-1])
    for word in complete:
        if word in WITH_VALUE:
            next(complete, None)
        elif not word.startswith("-"):
            return word
    return None
