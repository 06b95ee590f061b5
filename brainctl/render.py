"""Pages for people: what a command prints when nobody asked for --json.

Owns the tables, the timeline and the words for flags, decisions and risks. Pure: a wire object and a width in, lines
out, everything in them already safe to show. What a person may do next is the lane's own `next_action`, never invented
here.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from brainlaned.wire import Decision, Flag, Status, parse_time

from .text import command, cut, one_line, pad, paint, width, wrapped

Json = dict[str, Any]

STATUS_COLOURS: dict[str, str] = {
    Status.QUEUED: "cyan",
    Status.RUNNING: "cyan",
    Status.HELD: "yellow",
    Status.DONE: "green",
    Status.FAILED: "red",
    Status.CANCELLED: "dim",
}

FLAG_WORDS: dict[str, str] = {
    Flag.TRUNCATED: "cut off by the token limit",
    Flag.PARTIAL: "only a part of the answer",
    Flag.NO_END_MARKER: "the stream had no end marker",
    Flag.NO_FINISH_REASON: "the brain gave no finish reason",
    Flag.INVALID_BYTES: "invalid bytes were replaced",
    Flag.OPERATOR_TEXT: "written by an operator",
}

DECISION_WORDS: dict[Decision, str] = {
    Decision.RESEND: "ask the brain again",
    Decision.ACCEPT: "take the part that arrived as the answer",
    Decision.COMPLETE: "give the answer yourself, from FILE or - for standard input",
    Decision.FAIL: "give it up as failed",
    Decision.CANCEL: "give it up as cancelled",
}

INDENT = " " * 10
"""Where the words of an entry of the status page begin."""

MARKS = (
    ("started_at", "claimed"),
    ("armed_at", "armed"),
    ("sent_at", "sent"),
    ("send_failed_at", "send failed"),
    ("headers_at", "headers"),
    ("first_byte_at", "first byte"),
    ("ended_at", "ended"),
)
"""The marks of an attempt in the order in which they are made."""


# Small words.


def shown(value: object) -> str:
    """Return a value as one safe line."""
    return one_line(str(value))


def moment(stamp: str) -> str:
    """Return a time as people read it, in UTC to the second."""
    return f"{parse_time(stamp):%Y-%m-%d %H:%M:%SZ}"


def age(stamp: str, now: datetime) -> str:
    """Return how long ago a time was, in its largest whole unit."""
    return span((now - parse_time(stamp)).total_seconds())


def span(seconds: float) -> str:
    """Return a length of time in its largest whole unit."""
    for unit, letter in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= unit:
            return f"{int(seconds // unit)}{letter}"
    return f"{max(0, int(seconds))}s"


def clock(seconds: float) -> str:
    """Return a length of time as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def painted_status(status: str) -> str:
    """Return a status in its colour."""
    return paint(shown(status), STATUS_COLOURS.get(status, "bold"))


def why(job: Json) -> str:
    """Return why a job stands where it stands: what a queued one waits for, and what is to be remarked of an answer."""
    words = shown(job.get("waiting") or job["reason"])
    if job.get("position"):
        words += f" #{job['position']}"
    return " ".join([words, *(f"+{shown(flag)}" for flag in job.get("flags") or ())])


def about(seconds: float) -> str:
    """Return a length of time as an estimate is told: rounded, in one unit."""
    for unit, letter in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 1.5 * unit:
            return f"{round(seconds / unit)} {letter}"
    return f"{max(1, round(seconds))} s"


def amount(size: int) -> str:
    """Return a number of bytes as people read it."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], columns: int, shrink: Sequence[int]) -> list[str]:
    """Set a table to so many columns by cutting the cells of the columns in `shrink`, the first of them first."""
    widths = [max(width(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    for i in shrink:
        over = sum(widths) + 2 * (len(widths) - 1) - columns
        if over > 0:
            widths[i] = max(min(widths[i], max(4, width(headings[i]))), widths[i] - over)
    lines = []
    for row in [headings, *rows]:
        lines.append("  ".join(pad(cut(cell, widths[i]), widths[i]) for i, cell in enumerate(row)).rstrip())
    return lines


# Pages.


def jobs(listed: Json, columns: int, now: datetime) -> list[str]:
    """Set a list of jobs, one line each."""
    headings = ("ID", "STATUS", "WHY", "AGE", "ROUTE", "MODEL", "LABELS")
    rows = [
        (
            str(job["id"]),
            shown(job["status"]),
            why(job),
            age(job["created_at"], now),
            shown(job["route"]),
            shown(job["model"]),
            " ".join(f"{shown(name)}={shown(value)}" for name, value in job["labels"].items()),
        )
        for job in listed["jobs"]
    ]
    head, *lines = table(headings, rows, columns, shrink=(6, 5, 4, 2))
    return [head, *(_colour_word(line, row[1]) for line, row in zip(lines, rows, strict=True))]


def _colour_word(line: str, status: str) -> str:
    return line.replace(f" {status}", f" {painted_status(status)}", 1)


def job(found: Json, columns: int, here: Callable[[str], str]) -> list[str]:
    """Set one job: the facts, the timeline of every attempt, the decisions, and what to do next."""
    lines = _headline(found, columns)
    for name, value in _facts(found):
        lines += wrapped(value, columns, " " * 13, f"  {name:<10} ")
    lines += ["", "seconds  since it was accepted"]
    for _, block in sorted(_timeline(found, columns), key=lambda entry: entry[0]):
        lines += block
    return [*lines, "", *next_lines(found, columns, here)]


def _headline(found: Json, columns: int) -> list[str]:
    first, *more = wrapped(f"job {found['id']}  {found['status']}  {why(found)}", columns, "  ", "")
    return [_colour_word(first, shown(found["status"])), *more]


def next_lines(found: Json, columns: int, here: Callable[[str], str]) -> list[str]:
    """Return the end of a job's page."""
    return command(here(found["next_action"]), columns, "  ", "next: ")


def _facts(found: Json) -> Iterable[tuple[str, str]]:
    submitter = found["submitter"]
    yield "because", found["detail"] or found["reason"]
    yield "route", f"{found['route']}, model {found['model']}"
    who = submitter.get("user") or f"uid {submitter['uid']}"
    yield "from", f"{who}, {moment(found['created_at'])}, {found['request_bytes']} bytes, priority {found['priority']}"
    if found["key"]:
        yield "key", found["key"]
    if found["labels"]:
        yield "labels", " ".join(f"{name}={value}" for name, value in found["labels"].items())
    if found["not_before"]:
        yield "not before", moment(found["not_before"])
    if found["due_at"]:
        yield "due", moment(found["due_at"])
    if found["cancel_requested_at"]:
        yield "cancel", f"asked for at {moment(found['cancel_requested_at'])}"
    if found.get("erased_at"):
        yield "erased", f"at {moment(found['erased_at'])}: the prompt and the answer are gone, the record stays"
    for flag in found["flags"]:
        yield "flag", f"{flag}: {FLAG_WORDS.get(flag, 'a remark that this brainctl does not know')}"
    if found["usage"]:
        yield "usage", _usage(found["usage"])
    promises = [
        words
        for words, holds in (
            ("may run twice", found["may_run_twice"]),
            ("must be complete", found["require_complete"]),
        )
        if holds
    ]
    yield "attempts", ", ".join([f"{found['attempt_count']} of {found['max_attempts']}", *promises])


def _usage(usage: Json) -> str:
    counts = {name: value for name, value in usage.items() if isinstance(value, int)}
    return ", ".join(f"{name.removesuffix('_tokens')} {value}" for name, value in counts.items())


def _timeline(found: Json, columns: int) -> Iterable[tuple[str, list[str]]]:
    """Yield what happened to a job, each with its time, in no order but that of its own kind."""

    def mark(at: str, name: str, note: str = "") -> tuple[str, list[str]]:
        seconds = (parse_time(at) - parse_time(found["created_at"])).total_seconds()
        return at, [line.rstrip() for line in wrapped(note, columns, " " * 23, f"{seconds:>8.3f}  {name:<11}  ")]

    yield mark(found["created_at"], "accepted")
    for attempt in found["attempts"]:
        notes = _notes(attempt)
        made = [mark(attempt[name], word, notes.get(name, "")) for name, word in MARKS if attempt[name]]
        # What is known of the attempt as a whole stands under its last mark.
        made[-1][1].extend(_evidence(found, attempt, columns))
        yield from made
    for decision in found["decisions"]:
        because = f": {shown(decision['reason'])}" if decision["reason"] else ""
        note = f"attempt {decision['attempt']}, by {shown(decision['user'] or decision['uid'])}{because}"
        yield mark(decision["at"], shown(decision["action"]), note)
    if found["finished_at"]:
        yield mark(found["finished_at"], shown(found["status"]))


def _notes(attempt: Json) -> dict[str, str]:
    upstream = f", id {shown(attempt['upstream_id'])}" if attempt["upstream_id"] else ""
    return {
        "started_at": f"attempt {attempt['attempt']}",
        "armed_at": "from here on bytes may leave",
        "headers_at": f"HTTP {attempt['http_status']}{upstream}",
        "ended_at": " ".join([shown(attempt[name]) for name in ("status", "reason", "finish_reason") if attempt[name]])
        + ("" if attempt.get("exit_status") is None else f", exit status {attempt['exit_status']}"),
    }


def _evidence(found: Json, attempt: Json, columns: int) -> list[str]:
    facts = [attempt["detail"]] if attempt["detail"] and attempt["detail"] != found["detail"] else []
    if attempt["endpoint"]:
        facts.append(f"asked {attempt['endpoint']}")
    if attempt["part_bytes"] is not None:
        facts.append(f"{attempt['part_bytes']} bytes of its answer are kept")
    return wrapped("; ".join([*facts, f"billed: {attempt['billed']}"]), columns, " " * 10)


def risk(found: Json) -> str:
    """Return what asking once more may cost, from the evidence of every attempt."""
    attempts = found["attempts"]
    if any(200 <= (attempt["http_status"] or 0) < 300 or attempt["billed"] == "yes" for attempt in attempts):
        return "asking again is certainly a second charge: the brain answered"
    if any(attempt["armed_at"] and not attempt["send_failed_at"] and attempt["billed"] != "no" for attempt in attempts):
        return "asking again may be a second charge: the request may have been carried out"
    return "asking again cannot be a second charge: nothing was carried out"


def sheet(found: Json, columns: int, here: Callable[[str], str]) -> list[str]:
    """Set what a person needs to decide about a held job: the evidence, the risk, and a command for each way out."""
    lines = _headline(found, columns)
    lines += wrapped(found["detail"] or found["reason"], columns, "  ")
    decisions = allowed(found)
    if not decisions:
        return [*lines, "  nothing is to be decided", *next_lines(found, columns, here)]
    lines += wrapped(risk(found), columns, "  ")
    for decision in decisions:
        argument = f"{decision} FILE" if decision is Decision.COMPLETE else decision
        words = here(f"brainctl recover {found['id']} --{argument} --attempt {found['attempt_count']}")
        lines += [*command(words, columns, "    "), *wrapped(DECISION_WORDS[decision], columns, " " * 8)]
    return lines


def allowed(found: Json) -> list[Decision]:
    """Return what may be decided: nothing but about a held job, and a part can be accepted only where there is one."""
    if found["status"] != Status.HELD:
        return []
    kept = bool(found["attempts"]) and bool(found["attempts"][-1]["part_bytes"])
    return [decision for decision in Decision if kept or decision is not Decision.ACCEPT]


def outcome(found: Json, here: Callable[[str], str]) -> str | None:
    """Return the line for a job that has been waited for, or None where there is nothing to say."""
    number, reason, detail = found["id"], found["reason"], found["detail"]
    follow_up = f"next: {here(found['next_action'])}"
    lines: dict[str, str] = {
        Status.HELD: f"job {number} is held ({reason}): {detail}; {follow_up}",
        Status.FAILED: f"job {number} failed ({reason}): {detail}; {follow_up}",
        Status.CANCELLED: f"job {number} was cancelled ({reason}): {detail}; {follow_up}",
        Status.DONE: "; ".join(f"job {number} is {flag}: {FLAG_WORDS.get(flag, '?')}" for flag in found["flags"]),
    }
    return (
        lines.get(found["status"], f"job {number} is still {found['status']} ({why(found)}) and goes on; {follow_up}")
        or None
    )


def moved(found: Json) -> list[str]:
    """Return where a job stands now, for a program to read."""
    return [f"{found['id']} {shown(found['status'])}"]


def cancelled(found: Json) -> list[str]:
    """Return what a cancel achieved: the word `cancelled` only once nothing of the job is alive."""
    closing = found["cancel_requested_at"] is not None and not found["final"]
    return [f"{found['id']} cancelling: its call is being closed"] if closing else moved(found)


def forgotten(found: Json) -> list[str]:
    """Return that a job's prompt and answer are gone."""
    return [f"{found['id']} forgotten"]


def refused(job: int, refusal: Json) -> list[str]:
    """Return why something could not be done to one job of several."""
    return [f"{job} {shown(refusal['error']['kind'])}"]


def progress(found: Json, elapsed_s: float) -> str:
    """Return the line that is shown, and rewritten, while a job is waited for."""
    place = f", number {found['position']} in line" if found.get("position") else ""
    return f"job {found['id']}: {shown(found.get('waiting') or found['status'])}{place}, {clock(elapsed_s)}"


def status(found: Json, path: str, columns: int, here: Callable[[str], str]) -> list[str]:
    """Set the lane at a glance: what it does, what waits, what is in the way, what needs a person."""
    now = datetime.now(UTC)
    lane = found["lane"]
    lines = _entry("lane", _lane(lane), columns)
    if lane.get("paused_reason"):
        lines += wrapped(f"because: {lane['paused_reason']}", columns, INDENT)
    if lane.get("paused_at"):
        lines += command(here("brainctl resume"), columns, INDENT)
    up = f", up {age(found['started_at'], now)}" if found.get("started_at") else ""
    lines += wrapped(f"{path}, brainlaned {found['version']}{up}", columns, INDENT)
    for warning in _warnings(lane):
        first, *more = _entry("warning", warning, columns)
        lines += [first.replace("warning", paint("warning", "yellow"), 1), *more]
    lines += _entry("running", _running(found["running"]), columns)
    lines += _entry("queued", _queued(found), columns)
    ended = ("held", "failed", "done", "cancelled")
    lines += _entry("others", ", ".join(f"{found['counts'][name]} {name}" for name in ended), columns)
    for route in found["routes"]:
        lines += _route(route, columns, now, here)
    if found.get("last_run"):
        last = found["last_run"]
        when = f"at {moment(last['ended_at'])}: " if last.get("ended_at") else ""
        lines += _entry("last run", f"{when}{last.get('ending') or 'nobody wrote down how it ended'}", columns)
    if found["needs_person"]:
        lines += ["", f"{paint('needs a person', 'yellow')}:"]
        for waiter in found["needs_person"]:
            told = f"job {waiter['id']} {waiter['status']} ({waiter['reason']}): {waiter['detail']}"
            lines += [*wrapped(told, columns, "  "), *command(here(waiter["next_action"]), columns, "    ")]
        more_held = found["counts"][Status.HELD] - len(found["needs_person"])
        if more_held > 0:
            lines += [f"  and {more_held} more", *command(here("brainctl recover"), columns, "    ")]
    return lines


def _entry(name: str, words: str, columns: int) -> list[str]:
    return wrapped(words, columns, INDENT, f"{name:<{len(INDENT)}}")


def _lane(lane: Json) -> str:
    state = shown(lane["state"])
    if not lane.get("paused_at"):
        return state
    by = f" by {shown(lane['paused_by'])}" if lane.get("paused_by") else ""
    paused = f"paused since {moment(lane['paused_at'])}{by}"
    # One that is about to stop may be paused as well, and will be when it comes back.
    return paused if state == "paused" else f"{state}, {paused}"


def _warnings(lane: Json) -> Iterable[str]:
    if lane.get("answer_waiting"):
        yield "an answer waits to be stored: the database cannot be written"
    if lane.get("disk_reserve"):
        free = lane.get("disk_free_bytes")
        left = "" if free is None else f" ({amount(free)} free)"
        yield f"the disk is nearly full{left}: nothing is claimed or accepted"


def _running(running: Json | None) -> str:
    if not running:
        return "nothing"
    on = f"on {running['route']} ({running['model']})"
    words = [f"job {running['id']}, attempt {running['attempt']} {on}", clock(running["elapsed_s"])]
    if running.get("tokens") is not None:
        words.append(f"about {running['tokens']} tokens")
    if running.get("cancel_requested_at"):
        words.append("its call is being closed")
    return ", ".join(words)


def _queued(found: Json) -> str:
    words, oldest = [str(found["counts"][Status.QUEUED])], found["oldest_queued"]
    if oldest:
        words.append(f"the oldest is job {oldest['id']}, accepted {span(oldest['age_s'])} ago")
    if found["counts"][Status.QUEUED] and found.get("estimate_s") is not None:
        words.append(f"about {about(found['estimate_s'])} for the queue")
    return ", ".join(words)


def _route(route: Json, columns: int, now: datetime, here: Callable[[str], str]) -> Iterable[str]:
    name, waiting = route["route"], f"{route['queued']} queued"
    if route["open"]:
        yield from _entry("route", f"{name} open, {waiting}", columns)
        return
    since = f" for {age(route['since'], now)}" if route.get("since") else ""
    probe = f", asked again at {moment(route['next_probe_at'])}" if route.get("next_probe_at") else ""
    yield from _entry("route", f"{name} closed{since}: {route['reason']}{probe}, {waiting}", columns)
    if route.get("detail"):
        yield from wrapped(route["detail"], columns, INDENT)
    yield from command(here(f"brainctl resume --route {name}"), columns, INDENT)


def lane_line(route: str | None, found: Json) -> list[str]:
    """Return one line for what a pause or resume achieved."""
    for gate in found["routes"]:
        if gate["route"] == route:
            return [f"route {shown(route)} " + ("open" if gate["open"] else f"closed: {shown(gate['reason'])}")]
    return [f"lane {_lane(found['lane'])}"]
