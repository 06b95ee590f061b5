"""The pages: they fit the line, they show every piece of evidence, and nothing in them is a stranger's to command."""

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainctl import render, text
from brainlaned.wire import Decision, Flag, Status, format_time

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


def at(seconds: float) -> str:
    return format_time(datetime.fromtimestamp(NOW.timestamp() + seconds, UTC))


def job_of(**changes: Any) -> dict[str, Any]:
    return {
        "id": 17,
        "key": "k",
        "status": "done",
        "reason": "answered",
        "detail": "HTTP 200, complete",
        "waiting": None,
        "next_action": "brainctl output 17",
        "final": True,
        "route": "local",
        "model": "m",
        "priority": "normal",
        "labels": {},
        "flags": [],
        "usage": None,
        "max_attempts": 3,
        "may_run_twice": False,
        "require_complete": False,
        "attempt_count": 1,
        "position": None,
        "request_bytes": 10,
        "created_at": at(0),
        "not_before": None,
        "due_at": None,
        "started_at": at(1),
        "finished_at": None,
        "cancel_requested_at": None,
        "submitter": {"uid": 1000, "user": "ann", "pid": 5},
        "attempts": [],
        "decisions": [],
        **changes,
    }


def attempt_of(**changes: Any) -> dict[str, Any]:
    marks = ("armed_at", "sent_at", "send_failed_at", "headers_at", "first_byte_at", "ended_at")
    return {
        "attempt": 1,
        "status": "running",
        "reason": None,
        "detail": None,
        "route": "local",
        "model": "m",
        "endpoint": None,
        "started_at": at(1),
        **dict.fromkeys(marks),
        "http_status": None,
        "upstream_id": None,
        "finish_reason": None,
        "flags": [],
        "usage": None,
        "billed": "possibly",
        "part_bytes": None,
        "run": "r",
        **changes,
    }


def here(command: str) -> str:
    return command


HOSTILE = "\x1b]0;title\x07\u202eevil\n\t\x9b2J" + "好" * 60


def pages_of(words: str) -> list[list[str]]:
    """Every page, with the same words wherever a stranger or the lane may put some."""
    attempt = attempt_of(
        detail=words,
        endpoint=words,
        upstream_id=words,
        reason=words,
        finish_reason=words,
        headers_at=at(2),
        ended_at=at(3),
    )
    decision = {"action": "fail", "attempt": 1, "reason": words, "at": at(4), "uid": 1, "user": words, "pid": 1}
    job = job_of(
        status="held",
        reason=words,
        detail=words,
        waiting=words,
        route=words,
        model=words,
        key=words,
        labels={"k": words},
        flags=[words],
        next_action=words,
        submitter={"uid": 1, "user": words, "pid": 1},
        attempts=[attempt],
        decisions=[decision],
    )
    lane = {
        "version": words,
        "lane": {"state": words, "paused_at": at(0), "paused_by": words, "paused_reason": words},
        "routes": [{"route": words, "open": False, "reason": words, "detail": words, "queued": 1}],
        "counts": dict.fromkeys(Status, 1),
        "running": {"id": 1, "attempt": 1, "route": words, "model": words, "elapsed_s": 1},
        "oldest_queued": {"id": 1, "age_s": 1},
        "needs_person": [job],
        "last_run": {"ending": words},
    }
    return [
        render.jobs({"jobs": [job, job]}, 80, NOW),
        render.job(job, 80, here),
        render.sheet(job, 80, here),
        render.status(lane, words, 80, here),
        render.lane_line(words, lane),
        render.moved(job),
        [render.progress(job, 5)],
    ]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_no_page_holds_what_a_terminal_would_obey(words: str) -> None:
    for page in [*pages_of(words), *pages_of(HOSTILE + words)]:
        for line in page:
            assert text.one_line(line) == line


def test_a_list_fits_80_columns_with_its_columns_in_place() -> None:
    jobs = [
        job_of(id=1234567, status="queued", waiting="route-gated", position=1001, labels={"team": "x" * 50, "b": "c"}),
        job_of(route="a-very-long-name-of-a-route", model="vendor/some-very-long-model-name-2026-01-31"),
        job_of(status="cancelled", reason="cancel-requested", labels={"k": "好" * 40}),
    ]
    lines = render.jobs({"jobs": jobs}, 80, NOW)
    assert all(text.width(line) <= 80 for line in lines)
    assert lines[0].split() == ["ID", "STATUS", "WHY", "AGE", "ROUTE", "MODEL", "LABELS"]
    assert lines[1].startswith("1234567  queued     route-gated #1001  0s ")
    assert render.jobs({"jobs": []}, 80, NOW) == ["ID  STATUS  WHY  AGE  ROUTE  MODEL  LABELS"]


def test_every_mark_of_every_attempt_stands_in_the_timeline_in_order() -> None:
    first = attempt_of(
        status="unknown",
        reason="sent-outcome-unknown",
        armed_at=at(1.5),
        sent_at=at(1.75),
        ended_at=at(3),
        endpoint="http://x/v1",
        part_bytes=12,
    )
    second = attempt_of(
        attempt=2,
        started_at=at(60),
        armed_at=at(60.1),
        sent_at=at(60.2),
        headers_at=at(61),
        http_status=200,
        upstream_id="chatcmpl-1",
        first_byte_at=at(62),
        ended_at=at(63),
        status="succeeded",
        reason="answered",
        finish_reason="stop",
        billed="yes",
    )
    decision = {"action": "resend", "attempt": 1, "reason": "it was down", "at": at(30), "uid": 0, "user": "root"}
    found = job_of(attempts=[first, second], decisions=[decision], attempt_count=2, finished_at=at(63))
    page = render.job(found, 80, here)
    marks = [tuple(line.split()[:2]) for line in page if re.match(r" +\d+\.\d{3}  ", line)]
    assert marks == [
        ("0.000", "accepted"),
        ("1.000", "claimed"),
        ("1.500", "armed"),
        ("1.750", "sent"),
        ("3.000", "ended"),
        ("30.000", "resend"),
        ("60.000", "claimed"),
        ("60.100", "armed"),
        ("60.200", "sent"),
        ("61.000", "headers"),
        ("62.000", "first"),
        ("63.000", "ended"),
        ("63.000", "done"),
    ]
    whole = "\n".join(page)
    for evidence in (
        "12 bytes",
        "http://x/v1",
        "billed: possibly",
        "HTTP 200, id chatcmpl-1",
        "attempt 1, by root: it was down",
    ):
        assert evidence in whole
    assert page[-1] == "next: brainctl output 17"


@pytest.mark.parametrize(
    ("attempts", "risk"),
    [
        ([], "cannot be"),
        ([{}], "cannot be"),
        ([{"armed_at": at(1), "billed": "possibly"}], "may be"),
        ([{"armed_at": at(1), "send_failed_at": at(2), "billed": "no"}], "cannot be"),
        ([{"armed_at": at(1), "http_status": 200, "billed": "yes"}], "certainly"),
        ([{"armed_at": at(1), "http_status": 429, "billed": "no"}], "cannot be"),
        ([{"armed_at": at(1), "http_status": 500, "billed": "possibly"}], "may be"),
        ([{"armed_at": at(1), "http_status": 200, "billed": "yes"}, {}], "certainly"),
    ],
)
def test_the_risk_of_asking_again_follows_from_the_evidence(attempts: list[dict[str, Any]], risk: str) -> None:
    assert risk in render.risk(job_of(attempts=[attempt_of(**each) for each in attempts]))


def test_a_part_can_be_accepted_only_where_there_is_one_and_nothing_is_decided_about_what_is_not_held() -> None:
    def held(part: int | None) -> dict[str, Any]:
        return job_of(status="held", attempts=[attempt_of(part_bytes=part)])

    assert render.allowed(held(5)) == list(Decision)
    assert Decision.ACCEPT not in render.allowed(held(0)) + render.allowed(held(None))
    assert render.allowed(job_of(status="done")) == []
    assert "brainctl recover 17 --complete FILE --attempt 1" in "\n".join(render.sheet(held(5), 80, here))
    assert render.sheet(job_of(), 80, here)[-1] == "next: brainctl output 17"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, None),
        ({"flags": ["truncated"]}, "job 17 is truncated: cut off by the token limit"),
        (
            {"status": "failed", "reason": "filtered"},
            "job 17 failed (filtered): HTTP 200, complete; next: brainctl output 17",
        ),
        ({"status": "held", "reason": "x"}, "job 17 is held (x): HTTP 200, complete; next: brainctl output 17"),
        ({"status": "cancelled"}, "job 17 was cancelled (answered): HTTP 200, complete; next: brainctl output 17"),
        (
            {"status": "queued", "waiting": "lane-paused", "position": 2},
            "job 17 is still queued (lane-paused #2) and goes on; next: brainctl output 17",
        ),
    ],
)
def test_there_is_one_line_for_each_way_in_which_waiting_ends(changes: dict[str, Any], line: str | None) -> None:
    assert render.outcome(job_of(**changes), here) == line


def test_every_word_of_the_contract_has_words_for_people() -> None:
    assert set(render.FLAG_WORDS) == set(Flag)
    assert set(render.DECISION_WORDS) == set(Decision)
    assert set(render.STATUS_COLOURS) == set(Status)


def test_cancelled_is_said_only_when_nothing_of_the_job_is_alive() -> None:
    closing = job_of(status="running", final=False, cancel_requested_at=at(1))
    assert render.cancelled(closing) == ["17 cancelling: its call is being closed"]
    assert render.cancelled(job_of(status="cancelled", cancel_requested_at=at(1))) == ["17 cancelled"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0s"), (0.9, "0s"), (59, "59s"), (60, "1m"), (7199, "1h"), (86400, "1d"), (1e8, "1157d")],
)
def test_a_span_is_told_in_its_largest_whole_unit(seconds: float, words: str) -> None:
    assert render.span(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "1 s"), (0.4, "1 s"), (59, "59 s"), (89, "89 s"), (90, "2 m"), (720, "12 m"), (5399, "90 m"), (5400, "2 h")],
)
def test_an_estimate_is_told_rounded(seconds: float, words: str) -> None:
    assert render.about(seconds) == words


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (52_400_000, "52.4 MB"), (10**9, "1.0 GB")],
)
def test_an_amount_is_told_in_its_unit(size: int, words: str) -> None:
    assert render.amount(size) == words


def lane_of(**changes: Any) -> dict[str, Any]:
    lane = {"state": "open", "paused_at": None, "paused_by": None, "paused_reason": None}
    return {
        "version": "1",
        "lane": {**lane, **changes.pop("lane", {})},
        "routes": [],
        "counts": {**dict.fromkeys(Status, 0), **changes.pop("counts", {})},
        "estimate_s": None,
        "running": None,
        "oldest_queued": None,
        "needs_person": [],
        "last_run": None,
        **changes,
    }


def page_of(**changes: Any) -> str:
    return "\n".join(render.status(lane_of(**changes), "/s", 80, here))


@pytest.mark.parametrize(
    ("counts", "estimate_s", "told"),
    [
        ({"queued": 3}, 720.0, "queued    3, about 12 m for the queue"),
        ({"queued": 3}, None, "queued    3"),
        ({"queued": 0}, 0.0, "queued    0"),
    ],
)
def test_how_long_the_queue_takes_is_told_only_where_there_is_one_and_it_is_known(
    counts: dict[str, int], estimate_s: float | None, told: str
) -> None:
    assert told in page_of(counts=counts, estimate_s=estimate_s).splitlines()


@pytest.mark.parametrize(
    ("tokens", "told"),
    [(340, "0:12, about 340 tokens"), (0, "0:12, about 0 tokens"), (None, "0:12")],
)
def test_how_much_of_the_answer_is_here_is_told_where_it_is_known(tokens: int | None, told: str) -> None:
    running = {"id": 5, "attempt": 2, "route": "local", "model": "m", "elapsed_s": 12.5, "tokens": tokens}
    assert f"running   job 5, attempt 2 on local (m), {told}" in page_of(running=running).splitlines()


def test_a_full_disk_and_an_answer_that_cannot_be_stored_are_warned_of() -> None:
    assert "warning" not in page_of(lane={"disk_reserve": False, "answer_waiting": False, "disk_free_bytes": 10**9})
    low = page_of(lane={"disk_reserve": True, "disk_free_bytes": 52_400_000})
    assert "warning   the disk is nearly full (52.4 MB free): nothing is claimed or accepted" in low
    assert "warning   an answer waits to be stored" in page_of(lane={"answer_waiting": True})


def test_a_lane_that_stops_is_not_said_to_stop_since_it_was_paused() -> None:
    assert page_of(lane={"state": "stopping"}).startswith("lane      stopping\n")
    paused = {"paused_at": at(0), "paused_by": "ann"}
    both = page_of(lane={"state": "stopping", **paused})
    assert both.startswith("lane      stopping, paused since 2026-01-31 12:00:00Z by ann\n")
    assert "          brainctl resume\n" in both


def test_a_closed_gate_is_told_with_its_reason_its_next_probe_and_the_command_that_opens_it() -> None:
    gate = {"route": "gpu", "open": False, "reason": "unreachable", "detail": "refused", "queued": 2, "since": at(0)}
    page = page_of(routes=[{**gate, "next_probe_at": at(60)}])
    told = " ".join(page.split())
    assert "closed for" in told and "unreachable, asked again at 2026-01-31 12:01:00Z, 2 queued refused" in told
    assert "          brainctl resume --route gpu" in page.splitlines()
    assert "asked again" not in page_of(routes=[{**gate, "next_probe_at": None}])


def test_more_held_jobs_than_the_lane_names_are_not_forgotten() -> None:
    held = {"id": 7, "status": "held", "reason": "x", "detail": "d", "next_action": "brainctl recover 7"}
    assert "more" not in page_of(counts={"held": 1}, needs_person=[held])
    page = page_of(counts={"held": 25}, needs_person=[held] * 20)
    assert page.endswith("  and 5 more\n    brainctl recover")


# A quoted word of a command cannot be broken, and an escape stands for itself only in quotation marks.
PLAIN = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="'\"\\").filter(str.isprintable))


@settings(deadline=None)
@given(st.lists(PLAIN.filter(lambda word: text.safe(word) == word), max_size=5).map(" ".join))
def test_every_page_of_a_job_and_of_the_lane_fits_80_columns(words: str) -> None:
    jobs, job, sheet, lane, *_ = pages_of(words + "x" * 90)
    for line in [*jobs, *job, *sheet, *lane]:
        assert text.width(line) <= 80, line


def test_a_job_whose_payload_is_gone_says_since_when() -> None:
    page = "\n".join(render.job(job_of(erased_at=at(5)), 80, here))
    assert "erased     at 2026-01-31 12:00:05Z: the prompt and the answer are gone" in page
    assert render.forgotten(job_of(erased_at=at(5))) == ["17 forgotten"]
