"""The catalogue of every line that the operator can read in the journal. No other module logs.

One function per event: its level, its words, its fields. Prompts, answers and keys never come here. Lines go through a
queue, so that a journal that does not take them cannot hold up the lane.
"""

import logging
import logging.handlers
import queue
import sys
from typing import TextIO

from .wire import Reason

_logger = logging.getLogger("brainlaned")
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class _Formatter(logging.Formatter):
    """Lines with the syslog priority in front, as sd-daemon(3) has it; a terminal is spared the number."""

    def __init__(self, with_priority: bool) -> None:
        super().__init__()
        self._with_priority = with_priority

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).replace("\n", "\n  ")
        return f"<{_PRIORITIES.get(record.levelno, 6)}>{text}" if self._with_priority else text


def start(stream: TextIO | None = None) -> logging.handlers.QueueListener:
    """Begin to write events to a stream (stderr). Stop the returned listener last of all."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter(with_priority=not stream.isatty()))
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    _logger.handlers = [logging.handlers.QueueHandler(lines)]
    _logger.setLevel(logging.INFO)
    _logger.propagate = False
    listener = logging.handlers.QueueListener(lines, handler)
    listener.start()
    return listener


def ready(socket_path: str, state_dir: str, version: str) -> None:
    _logger.info("brainlaned %s is ready: socket %s, state %s", version, socket_path, state_dir)


def stopping(signal_name: str) -> None:
    _logger.info("stopping on %s: nothing new is claimed, the call in flight may finish", signal_name)


def abandoning(why: str) -> None:
    _logger.warning("abandoning the call in flight: %s", why)


def stopped(ending: str) -> None:
    _logger.info("stopped: %s", ending)


def start_refused(message: str, next_action: str) -> None:
    _logger.error("%s; next: %s", message, next_action)


def submitted(job_id: int, route: str, uid: int) -> None:
    _logger.info("job %d accepted for route %s from uid %d", job_id, route, uid)


def claimed(job_id: int, attempt: int, route: str) -> None:
    _logger.info("job %d attempt %d begins on route %s", job_id, attempt, route)


def ended(job_id: int, attempt: int, route: str, status: str, reason: Reason, detail: str) -> None:
    level = logging.WARNING if status in {"held", "failed"} else logging.INFO
    _logger.log(level, "job %d attempt %d on route %s: %s (%s): %s", job_id, attempt, route, status, reason, detail)


def superseded(job_id: int, attempt: int, message: str) -> None:
    _logger.error("job %d attempt %d: its end was not stored: %s", job_id, attempt, message)


def answer_waiting(job_id: int, attempt: int, error: str) -> None:
    _logger.error("job %d attempt %d: the answer is waiting to be stored: %s", job_id, attempt, error)


def answer_stored(job_id: int, attempt: int, waited_s: float) -> None:
    _logger.info("job %d attempt %d: the answer is stored, after %.1f s", job_id, attempt, waited_s)


def claim_failed(error: str) -> None:
    _logger.error("nothing can be claimed for now: %s", error)


def spool_failed(job_id: int, attempt: int, error: str) -> None:
    _logger.error("job %d attempt %d: its spool failed: %s", job_id, attempt, error)


def spool_set_aside(job_id: int, attempt: int, name: str) -> None:
    _logger.warning("a spool file names job %d attempt %d, which nobody knows: kept as %s", job_id, attempt, name)


def recovered(job_id: int, attempt: int, route: str, reason: Reason, detail: str) -> None:
    _logger.warning("job %d attempt %d on route %s recovered (%s): %s", job_id, attempt, route, reason, detail)


def recovery_delayed(job_id: int, attempt: int, error: str) -> None:
    _logger.warning("job %d attempt %d cannot be recovered yet: %s", job_id, attempt, error)


def decided(job_id: int, action: str, uid: int, pid: int | None) -> None:
    _logger.info("job %d: %s, decided by uid %d pid %s", job_id, action, uid, pid)


def lane_changed(change: str, uid: int, pid: int | None, reason: str | None) -> None:
    _logger.info("lane %s by uid %d pid %s%s", change, uid, pid, f": {reason}" if reason else "")


def lane_stopped_by_contradiction(job_id: int, detail: str) -> None:
    _logger.critical("job %d: %s: the lane is paused", job_id, detail)


def forbidden(uid: int, pid: int, role: str) -> None:
    _logger.warning("refused uid %d pid %d, who may not %s", uid, pid, role)


def unknown_group(name: str) -> None:
    _logger.warning("there is no group '%s', which the configuration names", name)


def request_failed(method: str, path: str) -> None:
    _logger.exception("a request failed: %s %s", method, path)


def worker_failed() -> None:
    _logger.exception("the worker failed")
