"""The catalogue of every line that the operator can read in the journal. No other module logs.

One function per event: its level, its words, its fields. Prompts, answers and keys never come here. Under systemd an
event goes to the journal by its native protocol, with the fields BRAINLANE_JOB, BRAINLANE_ATTEMPT, BRAINLANE_ROUTE and
BRAINLANE_REASON and a MESSAGE_ID of its own, so that `journalctl BRAINLANE_JOB=17` shows a job's life and `journalctl
-x` says what to do; anywhere else it is a line on stderr. Both pass through a queue, so that a journal that takes
nothing cannot hold up the lane.
"""

import logging
import logging.handlers
import queue
import sys
import threading
import time
from typing import TextIO, cast

from .wire import Reason

IDS = {
    "ready": "4ac4df0c32754e59849aa531ce47e051",
    "stopping": "702fdda8f4da4f7c8da5205909370a86",
    "abandoning": "8e3896b54e494e6abe30ed3eb3b1a76b",
    "stopped": "b2a25c49d59d4be0b4c477843147ac1e",
    "start_refused": "751d564538cc496eac5a93cee467b42e",
    "submitted": "84bce673a8f74777b8d949c0fedc069a",
    "claimed": "41eeab9d2a6b4998985efb4459eb983f",
    "ended": "f03a8cf3cc1b40b59b358706435ec9cf",
    "held": "8beaac2427fb4e4bbb8514e81bf5596e",
    "recovered": "c652915ecc524020913a76a43437e7b4",
    "recovery_delayed": "bf43d7f6ca78435683bebbad2dda9319",
    "superseded": "7336cf330b7f4438a9f31533fa769afb",
    "answer_waiting": "b06bc1ba55ed45b8a591f1868041e42f",
    "answer_stored": "48745528f8894eb2af3d095b21c13263",
    "claim_failed": "99c3f909216549cc9bf20d5c4f2fe6ce",
    "spool_failed": "ee6376d8db5748ac96c237f1308dea25",
    "spool_set_aside": "17386aa0d6b34cb79e8f171414c6ef01",
    "decided": "4fa0d867696e4fb39079d64d92dd6be7",
    "lane_changed": "8941734b4478431ea6cc215a1adc725b",
    "lane_stopped_by_contradiction": "0a9953da7c394b578b34642adb75c498",
    "forbidden": "c49187cc47184a4eb50b733818286989",
    "unknown_group": "a03866070894430f93ed4bb9ee823bdc",
    "request_failed": "a7441c2c99f54653a054257c1e35f1af",
    "worker_failed": "411bb5f4fafe491b91d3a776cfd34823",
    "last_run_died": "c19aac0ce3d74af1a140f212ab8c148d",
    "watchdog_starved": "7ada961e06eb4ffaad9d92e40fe64768",
    "gate_closed": "ea81bafa878c4f0bb2d598ab6a84d92f",
    "gate_opened": "2cbf149d52964aba8922810617071da8",
    "disk_low": "e716cc4f4e614bdcbe22b4c1d491ee9a",
    "disk_ok": "07d6e9cd69114fe883629cb4bf6b26d5",
    "dropped": "a9a7a57348a04edba260cce358431b23",
    "connections_full": "0ccc8e01f7714164863df42157509fc1",
    "let_go": "6c51078cd7024784b479d5cb5d70f51a",
    "upkeep_failed": "3e5d53a9cbfa40bc957c1a6e510667c6",
    "log_pinned": "f30bbb589d6941be83b1fdb3bbd4eaeb",
    "log_cut": "76ce7e1122184343a41ed5bbb8bf07d6",
    "backed_up": "8efa80e8b59a4bb498bd83bab5af6591",
}
"""The MESSAGE_ID of each event, by the name of its function; never changed once released (sd_journal_print(3))."""

GATHER_S = 0.002
MOST_LINES = 10_000
"""So many lines may wait for a journal that takes none."""

SELDOM_S = 60.0
"""How far apart the lines are of what may go on happening, in seconds."""

_logger = logging.getLogger("brainlaned")
_listeners: list[logging.handlers.QueueListener] = []
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class _Formatter(logging.Formatter):
    """Lines with the syslog priority in front, as sd-daemon(3) has it; a terminal is spared the number."""

    def __init__(self, with_priority: bool) -> None:
        super().__init__()
        self._with_priority = with_priority

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).replace("\n", "\n  ")
        return f"<{_PRIORITIES.get(record.levelno, 6)}>{text}" if self._with_priority else text


class _JournalHandler(logging.Handler):
    """The journal's own protocol; where it is not to be had, a line on stderr."""

    def __init__(self, otherwise: logging.Handler) -> None:
        super().__init__()
        from logging_journald import JournaldTransport

        self._transport = JournaldTransport(connected=False)
        self._otherwise = otherwise

    def emit(self, record: logging.LogRecord) -> None:
        fields = {"MESSAGE": self.format(record), "PRIORITY": _PRIORITIES.get(record.levelno, 6)}
        fields |= {"SYSLOG_IDENTIFIER": "brainlaned", **getattr(record, "fields", {})}
        try:
            self._transport.send(fields.items())
        except OSError:
            self._otherwise.emit(record)


class _Queue(logging.handlers.QueueHandler):
    """Hands records on as they are: what is formatted is nobody's but the listener's time.

    A journal that takes nothing must not fill the memory either, so what comes then is lost.
    """

    def enqueue(self, record: logging.LogRecord) -> None:
        if cast("queue.SimpleQueue[logging.LogRecord]", self.queue).qsize() < MOST_LINES:
            super().enqueue(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


class _Listener(logging.handlers.QueueListener):
    """Writes what has queued up; it gathers for a moment, so that it is not woken for every line of many."""

    def dequeue(self, block: bool) -> logging.LogRecord:
        record: logging.LogRecord = super().dequeue(block)
        if cast("queue.SimpleQueue[logging.LogRecord]", self.queue).empty():
            time.sleep(GATHER_S)
        return record


def start(stream: TextIO | None = None) -> None:
    """Begin to write events, to the journal where stderr is connected to it, else to a stream (stderr)."""
    from logging_journald import check_journal_stream

    handler: logging.Handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter(with_priority=not (stream or sys.stderr).isatty()))
    if stream is None and check_journal_stream():
        handler = _JournalHandler(otherwise=handler)
    # Nobody reads which thread and process it was, and finding out takes longer than all the rest.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    _logger.handlers = [_Queue(lines)]
    _logger.setLevel(logging.INFO)
    _logger.propagate = False
    listener = _Listener(lines, handler)
    listener.start()
    _listeners.append(listener)


def stop(limit_s: float = 2.0) -> None:
    """Write what is left, for `limit_s` seconds at the most: a journal that takes nothing must not keep us."""
    while _listeners:
        writing = threading.Thread(target=_listeners.pop().stop, daemon=True)
        writing.start()
        writing.join(limit_s)


class _Seldom:
    """Lets through one event a minute of each kind; the journal drops lines of a service that floods it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, int]] = {}

    def due(self, kind: str) -> int | None:
        """Return how many were left out since the last one; None: this one is to be left out."""
        now = time.monotonic()
        with self._lock:
            last, left_out = self._kept.get(kind, (-SELDOM_S, 0))
            is_due = now - last >= SELDOM_S
            self._kept = {other: entry for other, entry in self._kept.items() if now - entry[0] < 10 * SELDOM_S}
            self._kept[kind] = (now, 0) if is_due else (last, left_out + 1)
            return left_out if is_due else None


_seldom = _Seldom()


def _event(
    name: str,
    level: int,
    text: str,
    *values: object,
    job: int | None = None,
    attempt: int | None = None,
    route: str | None = None,
    reason: str | None = None,
    with_traceback: bool = False,
    seldom: str | None = None,
) -> None:
    if seldom is not None:
        left_out = _seldom.due(f"{name} {seldom}")
        if left_out is None:
            return
        text += f" ({left_out} more like it since the last such line)" if left_out else ""
    given = {"JOB": job, "ATTEMPT": attempt, "ROUTE": route, "REASON": reason}
    fields = {f"BRAINLANE_{field}": value for field, value in given.items() if value is not None}
    fields |= {"MESSAGE_ID": IDS[name], "BRAINLANE_EVENT": name.replace("_", "-")}
    # Made here and now: the logger would look for who calls it, which is always us.
    record = logging.LogRecord(
        _logger.name, level, __file__, 0, text, values, sys.exc_info() if with_traceback else None
    )
    record.fields = fields
    _logger.handle(record)


def ready(socket_path: str, state_dir: str, version: str) -> None:
    _event("ready", logging.INFO, "brainlaned %s is ready: socket %s, state %s", version, socket_path, state_dir)


def stopping(signal_name: str) -> None:
    text = "stopping on %s: nothing new is claimed, the call in flight may finish"
    _event("stopping", logging.INFO, text, signal_name)


def abandoning(why: str) -> None:
    _event("abandoning", logging.WARNING, "abandoning the call in flight: %s", why)


def stopped(ending: str) -> None:
    _event("stopped", logging.INFO, "stopped: %s", ending)


def last_run_died(run: str, ending: str) -> None:
    _event("last_run_died", logging.WARNING, "the last run (%s) did not end by itself: %s", run, ending)


def start_refused(message: str, next_action: str) -> None:
    _event("start_refused", logging.ERROR, "%s; next: %s", message, next_action)


def watchdog_starved(why: str) -> None:
    _event("watchdog_starved", logging.CRITICAL, "no sign of life is given any more: %s", why)


def submitted(job_id: int, route: str, uid: int) -> None:
    text = "job %d accepted for route %s from uid %d"
    _event("submitted", logging.INFO, text, job_id, route, uid, job=job_id, route=route)


def claimed(job_id: int, attempt: int, route: str) -> None:
    text = "job %d attempt %d begins on route %s"
    _event("claimed", logging.INFO, text, job_id, attempt, route, job=job_id, attempt=attempt, route=route)


def ended(job_id: int, attempt: int, route: str, status: str, reason: Reason, detail: str) -> None:
    _event(
        "held" if status == "held" else "ended",
        logging.WARNING if status in {"held", "failed"} else logging.INFO,
        "job %d attempt %d on route %s: %s (%s): %s",
        *(job_id, attempt, route, status, reason, detail),
        job=job_id,
        attempt=attempt,
        route=route,
        reason=reason,
    )


def held(job_id: int, route: str, reason: Reason, detail: str) -> None:
    text = "job %d on route %s: held (%s): %s"
    values = (job_id, route, reason, detail)
    _event("held", logging.WARNING, text, *values, job=job_id, route=route, reason=reason)


def recovered(job_id: int, attempt: int, route: str, reason: Reason, detail: str) -> None:
    _event(
        "recovered",
        logging.WARNING,
        "job %d attempt %d on route %s recovered (%s): %s",
        *(job_id, attempt, route, reason, detail),
        job=job_id,
        attempt=attempt,
        route=route,
        reason=reason,
    )


def recovery_delayed(job_id: int, attempt: int, error: str) -> None:
    text = "job %d attempt %d cannot be recovered yet: %s"
    _event("recovery_delayed", logging.WARNING, text, job_id, attempt, error, job=job_id, attempt=attempt)


def superseded(job_id: int, attempt: int, message: str) -> None:
    text = "job %d attempt %d: its end was not stored: %s"
    _event("superseded", logging.ERROR, text, job_id, attempt, message, job=job_id, attempt=attempt)


def answer_waiting(job_id: int, attempt: int, error: str) -> None:
    text = "job %d attempt %d: the answer is waiting to be stored: %s"
    _event("answer_waiting", logging.ERROR, text, job_id, attempt, error, job=job_id, attempt=attempt)


def answer_stored(job_id: int, attempt: int, waited_s: float) -> None:
    text = "job %d attempt %d: the answer is stored, after %.1f s"
    _event("answer_stored", logging.INFO, text, job_id, attempt, waited_s, job=job_id, attempt=attempt)


def claim_failed(error: str) -> None:
    _event("claim_failed", logging.ERROR, "nothing can be claimed for now: %s", error, seldom="")


def spool_failed(job_id: int, attempt: int, error: str) -> None:
    text = "job %d attempt %d: its spool failed: %s"
    _event("spool_failed", logging.ERROR, text, job_id, attempt, error, job=job_id, attempt=attempt)


def spool_set_aside(job_id: int, attempt: int, name: str) -> None:
    text = "a spool file names job %d attempt %d, which nobody knows: kept as %s"
    _event("spool_set_aside", logging.WARNING, text, job_id, attempt, name, job=job_id, attempt=attempt)


def gate_closed(route: str, reason: str, detail: str, next_probe_at: str | None) -> None:
    again = f"asked again at {next_probe_at}" if next_probe_at else "only the operator opens it"
    text = "route %s is closed (%s), %s: %s"
    _event("gate_closed", logging.WARNING, text, route, reason, again, detail, route=route, reason=reason)


def gate_opened(route: str) -> None:
    _event("gate_opened", logging.INFO, "route %s is open again", route, route=route)


def decided(job_id: int, action: str, uid: int, pid: int | None) -> None:
    _event("decided", logging.INFO, "job %d: %s, decided by uid %d pid %s", job_id, action, uid, pid, job=job_id)


def lane_changed(change: str, uid: int, pid: int | None, reason: str | None) -> None:
    because = f": {reason}" if reason else ""
    _event("lane_changed", logging.INFO, "lane %s by uid %d pid %s%s", change, uid, pid, because)


def lane_stopped_by_contradiction(job_id: int, detail: str) -> None:
    text = "job %d: %s: the lane is paused"
    _event("lane_stopped_by_contradiction", logging.CRITICAL, text, job_id, detail, job=job_id)


def forbidden(uid: int, pid: int, role: str) -> None:
    text = "refused uid %d pid %d, who may not %s"
    _event("forbidden", logging.WARNING, text, uid, pid, role, seldom=f"{uid} {role}")


def unknown_group(name: str) -> None:
    _event("unknown_group", logging.WARNING, "there is no group '%s', which the configuration names", name)


def request_failed(method: str, path: str) -> None:
    _event("request_failed", logging.ERROR, "a request failed: %s %s", method, path, with_traceback=True)


def worker_failed() -> None:
    _event("worker_failed", logging.CRITICAL, "the worker failed", with_traceback=True)


def disk_low(directory: str, free: int, reserve: int) -> None:
    text = "nothing is claimed or accepted: %d MiB are free in %s, and disk_reserve_mib is %d"
    _event("disk_low", logging.ERROR, text, free // 2**20, directory, reserve // 2**20, seldom="")


def disk_ok(directory: str, free: int) -> None:
    text = "%d MiB are free in %s: jobs are claimed and accepted again"
    _event("disk_ok", logging.INFO, text, free // 2**20, directory, seldom="")


def dropped(uid: int, pid: int, why: str) -> None:
    _event("dropped", logging.WARNING, "closed the connection of uid %d pid %d: %s", uid, pid, why, seldom=str(uid))


def connections_full(uid: int, pid: int, most: int) -> None:
    text = "refused a connection of uid %d pid %d: there are %d already"
    _event("connections_full", logging.WARNING, text, uid, pid, most, seldom="")


def let_go(erased: int, deleted: int) -> None:
    text = "let go with age: prompt and answer of %d jobs, the record of %d"
    _event("let_go", logging.INFO, text, erased, deleted)


def upkeep_failed(error: str) -> None:
    _event("upkeep_failed", logging.ERROR, "cannot let go of what is old: %s", error, seldom="")


def log_pinned(path: str, size: int) -> None:
    text = "%s has %d MiB and cannot be cut: a reader of the database holds it; next: fuser -v %s"
    _event("log_pinned", logging.WARNING, text, path, size // 2**20, path.removesuffix("wal") + "shm")


def log_cut(path: str) -> None:
    _event("log_cut", logging.INFO, "%s is cut: its reader has let go", path)


def backed_up(uid: int, pid: int, size: int) -> None:
    _event("backed_up", logging.INFO, "a backup of %d bytes was made for uid %d pid %d", size, uid, pid)
