"""The commands: parse, ask the lane once, render.

Owns the options and their help, and the order in which a command's data goes out. Has no opinion on where a job stands:
exit statuses come from the tables of the contract, words from `render`. A command returns its exit status; what it
raises becomes one line and an exit status in `__main__`. Rooms that only one command needs are imported there, because
a command line that is typed often must start fast.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer

from brainlaned.wire import MAX_LIST, VERSION, Decision, ErrorKind, Exit, Priority, Status

from . import out, render, text
from .arguments import HeldJobId, JobId, JobIds, Raw, Timeout, complete_route, moment, seconds
from .client import Answer
from .errors import INTERRUPTED, Interrupted, Problem, say, usage
from .session import Session

if TYPE_CHECKING:
    from .wait import Waited

Json = dict[str, Any]

FOREVER = float("inf")
MAX_SHOWN_HELD = 50

SEVERITY = (Exit.FAILED, Exit.HELD, Exit.CANCELLED, Exit.WAITED_LONG_ENOUGH)
"""Of several jobs the first of these decides the exit status."""


def main(
    ctx: typer.Context,
    socket: Annotated[
        str | None, typer.Option("--socket", metavar="PATH", envvar="BRAINLANE_SOCKET", help="The lane's socket.")
    ] = None,
    lane: Annotated[str | None, typer.Option("--lane", metavar="NAME", help="The lane of this name.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what the lane answered, unchanged.")] = False,
    answer_within: Annotated[
        float | None,
        typer.Option("--answer-within", metavar="S", parser=seconds, help="How long the lane may take to answer (4)."),
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> int:
    """Talk to a lane: submit jobs to a language model, see what became of them, decide about what is held.

    Without a command: status.
    """
    session: Session = ctx.obj
    session.verb, session.json = ctx.invoked_subcommand, json
    given = ctx.get_parameter_source("socket")
    by_hand = given is not None and given.name == "COMMANDLINE"
    session.choose(socket, lane, by_hand=by_hand)
    if answer_within is not None:
        session.answer_within_s = answer_within
    if version:
        out.lines([f"brainctl {VERSION}"])
        raise typer.Exit
    return status(ctx) if ctx.invoked_subcommand is None else Exit.OK


# The commands.


def submit(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; - reads standard input.", show_default=False)
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from FILE or -.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message before it.")] = None,
    route: Annotated[
        str | None,
        typer.Option("--route", metavar="NAME", help="The way to a brain.", autocompletion=complete_route),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Another model than the route's.")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", metavar="K=V", help="A parameter of the completion; V as JSON, else as a string."),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="Asking again with the same key makes no second job.")
    ] = None,
    priority: Annotated[
        Priority | None, typer.Option("--priority", help="How much of a head start it gets.", show_default=False)
    ] = None,
    not_before: Annotated[
        str | None, typer.Option("--not-before", metavar="TIME", help="Not earlier than this: 2026-01-31T22:00:00Z.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="A label to find it by.")] = None,
    max_attempts: Annotated[
        int | None, typer.Option("--max-attempts", metavar="N", min=1, help="How often it may be tried.")
    ] = None,
    may_run_twice: Annotated[
        bool, typer.Option("--may-run-twice", help="Ask again even when the first time may have been carried out.")
    ] = False,
    require_complete: Annotated[
        bool, typer.Option("--require-complete", help="Hold the job if its answer is cut off by the token limit.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait, print the answer, exit as the job ended.")] = False,
    timeout: Timeout = None,
) -> int:
    """Hand in a job and print its id."""
    from . import request

    if timeout is not None and not wait:
        usage("cannot use --timeout without --wait: a submit does not wait for the job")
    session: Session = ctx.obj
    own_key = key if key is not None else f"brainctl-{uuid4().hex}"
    submission = request.submission(
        request.prompt(prompt, file),
        system=system,
        parameters=request.parameters(param or (), model),
        key=own_key,
        route=route,
        priority=priority,
        not_before=not_before,
        labels=request.pairs("--label", label or ()),
        max_attempts=max_attempts,
        may_run_twice=may_run_twice,
        require_complete=require_complete,
    )
    lane = session.lane()
    try:
        answer = lane.submit(submission)
    except Problem as problem:
        raise request.unclear(problem, session, own_key) from problem
    except KeyboardInterrupt:
        stopped = Problem(ErrorKind.OUTCOME_UNKNOWN, "interrupted before the lane had answered", maybe_done=True)
        stopped.exit_status = INTERRUPTED
        raise request.unclear(stopped, session, own_key) from None
    if not wait:
        _print(session, answer.body, lambda found: [str(found["id"])])
        return Exit.OK
    job = answer.object()["id"]
    with _free_to_leave(job):
        return _wait_for_answer(session, job, timeout)


def list_jobs(
    ctx: typer.Context,
    status: Annotated[Status | None, typer.Option("--status", help="Only jobs that stand there.")] = None,
    label: Annotated[str | None, typer.Option("--label", metavar="K=V", help="Only jobs with this label.")] = None,
    route: Annotated[
        str | None,
        typer.Option("--route", metavar="NAME", help="Only jobs of this route.", autocompletion=complete_route),
    ] = None,
    submitter: Annotated[
        str | None, typer.Option("--submitter", metavar="WHO", help="Only jobs of this user, by name or uid.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            parser=moment,
            help="Only jobs accepted then or later: 2026-01-31T22:00:00Z, or an age: 30m, 2h, 7d.",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", parser=moment, help="Only jobs accepted before then; as --since."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, max=MAX_LIST, help="How many (the newest first).")
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="ID", help="Only older jobs: what the last list called next.")
    ] = None,
) -> int:
    """List jobs, the newest first."""
    from .request import check_text

    check_text(**{"--label": label, "--route": route, "--submitter": submitter, "--after": after})
    session: Session = ctx.obj
    wanted = {"status": status, "label": label, "route": route, "submitter": submitter, "since": since, "until": until}
    answer = session.lane().list(**wanted, limit=limit, after=after)
    _print(session, answer.body, lambda found: render.jobs(found, text.columns(), datetime.now(UTC)))
    if text.is_terminal(sys.stderr) and not session.json:
        more = answer.object()["next"]
        if more is not None:
            say("there are more; next: " + session.here(_older(more, {**wanted, "limit": limit})))
    return Exit.OK


def _older(after: int, wanted: dict[str, Any]) -> str:
    """Return the command that lists what follows, with the same filters."""
    from shlex import join

    given = [word for name, value in wanted.items() if value is not None for word in (f"--{name}", str(value))]
    return join(["brainctl", "list", *given, "--after", str(after)])


def show(
    ctx: typer.Context,
    job: JobId,
    request: Annotated[bool, typer.Option("--request", help="The prompt alone, as the JSON that was asked.")] = False,
) -> int:
    """Show one job: the facts, the timeline with its evidence, what to do next."""
    session: Session = ctx.obj
    if request:
        out.document(session.lane().request(job).body)
        return Exit.OK
    answer = session.lane().show(job)
    _print(session, answer.body, lambda found: render.job(found, text.columns(), session.here))
    return Exit.OK


def output(
    ctx: typer.Context,
    job: JobId,
    partial_text: Annotated[bool, typer.Option("--partial", help="What has arrived so far.")] = False,
    raw: Raw = False,
    response: Annotated[bool, typer.Option("--response", help="The whole completion object.")] = False,
) -> int:
    """Print the text of a job, byte for byte."""
    session: Session = ctx.obj
    if partial_text and response:
        usage("cannot use --partial together with --response: a part has no completion object")
    if response or (session.json and not partial_text):
        out.document(session.lane().response(job).body)
    else:
        out.answer(session.lane().output(job, partial=partial_text).body, raw=raw)
    return Exit.OK


def follow(ctx: typer.Context, job: JobId, raw: Raw = False) -> int:
    """Print the text of a job as it arrives, and exit as it ends."""
    from .wait import follow

    session: Session = ctx.obj
    with _free_to_leave(job):
        if session.json:
            return _verdict(session, _until(session, job, FOREVER), show_json=True)
        live = out.Live(raw=raw)
        try:
            waited = follow(session.lane(), job, FOREVER, live.write)
        finally:
            live.end()
        return _verdict(session, waited)


def wait(ctx: typer.Context, jobs: JobIds, timeout: Timeout = None) -> int:
    """Wait until jobs are done, failed, cancelled or held, and exit as the worst of them."""
    session: Session = ctx.obj
    deadline = _deadline(timeout)
    ended: list[Waited] = []
    for job in dict.fromkeys(jobs):
        with _free_to_leave(job):
            waited = _until(session, job, deadline)
        _print(session, waited.body, render.moved)
        ended.append(waited)
    return _verdict(session, *ended)


def cancel(ctx: typer.Context, jobs: JobIds) -> int:
    """Cancel jobs, and say what that achieved."""
    session: Session = ctx.obj
    return _each(session, jobs, session.lane().cancel, render.cancelled)


def forget(
    ctx: typer.Context,
    jobs: JobIds,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Recorded with who and when.")] = None,
) -> int:
    """Erase the prompts and answers of jobs; their records stay.

    Only what is done, failed or cancelled can be forgotten. It cannot be taken back.
    """
    from .request import check_text

    check_text(**{"--reason": reason})
    session: Session = ctx.obj
    lane = session.lane()
    return _each(session, jobs, lambda job: lane.forget(job, reason), render.forgotten)


def retry(ctx: typer.Context, job: JobId) -> int:
    """Queue a failed job again, for one more attempt."""
    session: Session = ctx.obj
    lane = session.lane()
    before = lane.show(job).object()
    answer = lane.retry(job, before["attempt_count"])
    _print(session, answer.body, render.moved)
    if not session.json:
        say(f"job {job}: {render.risk(before)}")
    return Exit.OK


def recover(
    ctx: typer.Context,
    job: HeldJobId = None,
    resend: Annotated[bool, typer.Option("--resend", help=render.DECISION_WORDS[Decision.RESEND] + ".")] = False,
    accept: Annotated[bool, typer.Option("--accept", help=render.DECISION_WORDS[Decision.ACCEPT] + ".")] = False,
    complete: Annotated[
        str | None, typer.Option("--complete", metavar="FILE", help=render.DECISION_WORDS[Decision.COMPLETE] + ".")
    ] = None,
    fail: Annotated[bool, typer.Option("--fail", help=render.DECISION_WORDS[Decision.FAIL] + ".")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help=render.DECISION_WORDS[Decision.CANCEL] + ".")] = False,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Recorded with the decision.")] = None,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", metavar="N", min=1, help="Decide only if this is still its last attempt."),
    ] = None,
) -> int:
    """Show what is held and why, or decide about one job."""
    from .request import check_text, read_text

    session: Session = ctx.obj
    given = {
        Decision.RESEND: resend,
        Decision.ACCEPT: accept,
        Decision.COMPLETE: complete is not None,
        Decision.FAIL: fail,
        Decision.CANCEL: cancel,
    }
    chosen = [decision for decision, wanted in given.items() if wanted]
    check_text(**{"--reason": reason})
    if len(chosen) > 1:
        usage(f"cannot decide twice: --{chosen[0]} and --{chosen[1]} are both given")
    if not chosen and (reason is not None or attempt is not None):
        usage("cannot decide without a decision: give one of " + ", ".join(f"--{decision}" for decision in Decision))
    if chosen and job is None:
        usage(f"cannot decide with --{chosen[0]}: no ID is given")
    lane = session.lane()
    if job is None:
        return _list_held(session)
    if not chosen:
        answer = lane.show(job)
        _print(session, answer.body, lambda found: render.sheet(found, text.columns(), session.here))
        return Exit.OK
    decision: Json = {"action": chosen[0]}
    if complete is not None:
        decision["text"] = read_text(complete)
    # What was read just now is what is decided about: if the job has moved on since, the lane refuses.
    decision["attempt"] = attempt if attempt is not None else lane.show(job).object()["attempt_count"]
    if reason is not None:
        decision["reason"] = reason
    answer = lane.recover(job, decision)
    _print(session, answer.body, render.moved)
    return Exit.OK


def status(ctx: typer.Context) -> int:
    """Show the lane at a glance: what runs, what waits, what needs a person."""
    session: Session = ctx.obj
    lane = session.lane()
    answer = lane.status()
    _print(session, answer.body, lambda found: render.status(found, lane.path, text.columns(), session.here))
    return Exit.OK


def pause(
    ctx: typer.Context,
    reason: Annotated[
        str | None, typer.Option("--reason", metavar="TEXT", help="Shown to everybody who looks.")
    ] = None,
) -> int:
    """Let the lane claim nothing more; a call in flight goes on."""
    from .request import check_text

    check_text(**{"--reason": reason})
    session: Session = ctx.obj
    answer = session.lane().pause(reason)
    _print(session, answer.body, partial(render.lane_line, None))
    return Exit.OK


def resume(
    ctx: typer.Context,
    route: Annotated[
        str | None,
        typer.Option(
            "--route", metavar="NAME", help="Open the gate of this route only.", autocompletion=complete_route
        ),
    ] = None,
) -> int:
    """Let the lane claim again."""
    from .request import check_text

    check_text(**{"--route": route})
    session: Session = ctx.obj
    answer = session.lane().resume(route)
    _print(session, answer.body, partial(render.lane_line, route))
    return Exit.OK


def backup(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where the copy goes.", show_default=False)],
) -> int:
    """Copy the lane's database to FILE while the lane runs.

    The copy is checked, and its size and the number of its jobs are printed.
    FILE is written beside its place and put there whole; an earlier backup of that name is replaced.

    To restore: stop the lane (systemctl stop brainlaned.socket brainlaned), put the file in place of brainlane.db in
    its state directory (/var/lib/brainlane), remove brainlane.db-wal and brainlane.db-shm, give it to the lane's user,
    start the lane again. It comes up paused, for what was queued in the copy may have been asked since: look (brainctl
    list, brainctl recover), then brainctl resume.
    """
    from . import backup

    session: Session = ctx.obj
    return backup.run(session, file)


def demo(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(metavar="[PROMPT]", help="What to ask.")] = "Name the seas around Denmark.",
) -> int:
    """Try it out: a throw-away lane with the bundled model answers one prompt."""
    from . import demo
    from .request import check_text

    check_text(PROMPT=prompt)
    return demo.run(prompt)


COMMANDS: dict[str, Callable[..., int]] = {
    "submit": submit,
    "list": list_jobs,
    "show": show,
    "output": output,
    "follow": follow,
    "wait": wait,
    "cancel": cancel,
    "retry": retry,
    "recover": recover,
    "forget": forget,
    "status": status,
    "pause": pause,
    "resume": resume,
    "backup": backup,
    "demo": demo,
}


def application(words: Iterable[str], *, complete: bool) -> Callable[..., Any]:
    """Return the command line as a callable.

    Typer takes a millisecond per command to look at its options, so only those commands are made known whose names
    stand among the words, or all of them where none does, where help is wanted, or for a shell's completion.
    """
    wanted = set(words)
    if complete:
        import os

        from typer import completion as completion_of_typer

        from . import completion

        completion_of_typer.completion_init()  # type: ignore[attr-defined]
        completion.mend_typer()
        wanted = {completion.typed_verb(os.environ) or ""}
    known = set(COMMANDS) & wanted
    if not known or "--help" in wanted:
        known = set(COMMANDS)
    app = typer.Typer(
        name="brainctl",
        invoke_without_command=True,
        callback=main,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    for name, command in COMMANDS.items():
        if name in known:
            app.command(name)(command)
    return partial(app, prog_name="brainctl", standalone_mode=False)


# What several commands share.


def _each(
    session: Session, jobs: list[int], ask: Callable[[int], Answer], page: Callable[[Json], Iterable[str]]
) -> int:
    """Ask one thing of each job, print what that achieved, and exit as the first that was refused."""
    refused: list[Problem] = []
    for job in dict.fromkeys(jobs):
        try:
            answer = ask(job)
        except Problem as problem:
            if problem.body is None:
                raise
            _print(session, problem.body, partial(render.refused, job))
            refused.append(problem)
        else:
            _print(session, answer.body, page)
    if not refused:
        return Exit.OK
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    next_action = refused[0].next_action
    say(refused[0].message + more + (f"; next: {session.here(next_action)}" if next_action else ""))
    return refused[0].exit_status


def _print(session: Session, body: bytes, page: Callable[[Json], Iterable[str]]) -> None:
    """Print an answer: for a program as it came, for a person as a page, which is made for nobody else."""
    if session.json:
        out.document(body)
    else:
        out.lines(page(Answer(body).object()))


@contextmanager
def _free_to_leave(job: int) -> Iterator[None]:
    """Let a person who waits leave by Ctrl-C, and tell him that the job goes on and how to come back to it."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"stopped waiting, job {job} goes on", f"brainctl wait {job}") from None


def _deadline(timeout: float | None) -> float:
    return FOREVER if timeout is None else time.monotonic() + timeout


def _until(session: Session, job: int, deadline: float) -> "Waited":
    from .wait import until_settled

    return until_settled(session.lane(), job, deadline)


def _wait_for_answer(session: Session, job: int, timeout: float | None) -> int:
    from .wait import follow

    deadline = _deadline(timeout)
    if session.json:
        return _verdict(session, _until(session, job, deadline), show_json=True)
    if text.is_terminal(sys.stdout):
        live = out.Live()
        try:
            waited = follow(session.lane(), job, deadline, live.write)
        finally:
            live.end()
        return _verdict(session, waited)
    waited = _until(session, job, deadline)
    if waited.exit_status is Exit.OK:
        out.answer(session.lane().output(job).body)
    return _verdict(session, waited)


def _verdict(session: Session, *ended: "Waited", show_json: bool = False) -> int:
    """Say what there is to say of jobs that have been waited for, in one line, and return the exit status."""
    if show_json:
        out.document(ended[0].body)
    bad = [waited for status in SEVERITY for waited in ended if waited.exit_status is status]
    for waited in bad[:1] or ended:
        line = render.outcome(waited.job, session.here)
        if line:
            say(line + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""))
    return bad[0].exit_status if bad else Exit.OK


def _list_held(session: Session) -> int:
    lane = session.lane()
    answer = lane.list(status=Status.HELD, limit=MAX_SHOWN_HELD)
    if session.json:
        out.document(answer.body)
        return Exit.OK
    found = answer.object()
    for summary in found["jobs"]:
        out.lines([*render.sheet(lane.show(summary["id"]).object(), text.columns(), session.here), ""])
    if not found["jobs"]:
        out.lines(["nothing is held"])
    if found["next"] is not None:
        say("there are more; next: " + session.here(f"brainctl list --status held --after {found['next']}"))
    return Exit.OK
