"""What later releases must keep: a database of every schema that was ever released opens, and all of it can be used."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.brainserver import BrainServer
from tests.lane import Lane, config_for, running_lane

HERE = Path(__file__).parent
RELEASED = sorted(HERE.glob("release-*.db"))


def place_with(database: Path, directory: Path) -> None:
    """Make the state directory that a lane of that release left behind."""
    (directory / "state/spool").mkdir(parents=True)
    shutil.copy(database, directory / "state/brainlane.db")


def test_there_is_one_for_the_first_release() -> None:
    assert RELEASED[0].name == "release-0.1.0.db"


@pytest.mark.parametrize("database", RELEASED, ids=lambda path: path.stem)
def test_a_database_of_an_earlier_release_opens_and_goes_on(database: Path, tmp_path: Path) -> None:
    place_with(database, tmp_path)
    with BrainServer() as server, running_lane(tmp_path, config_for(server.base_url)) as lane:
        shown = lane.get("/v1/status").json
        assert (shown["lane"]["state"], shown["lane"]["paused_reason"]) == ("paused", "made for ever")
        jobs = {job["id"]: job for job in lane.get("/v1/jobs").json["jobs"]}
        assert [jobs[number]["status"] for number in sorted(jobs)] == [
            *("done", "failed", "held", "done", "done", "queued", "queued", "cancelled"),
        ]
        assert server.requests == []
        _check_what_was_kept(lane)
        # What was held and what was queued goes on.
        assert lane.post("/v1/jobs/3/recover", {"action": "resend"}).json["status"] == "queued"
        assert lane.post("/v1/jobs/2/retry", {}).json["status"] == "queued"
        lane.post("/v1/lane/resume")
        assert [lane.wait(number)["status"] for number in (2, 3, 7)] == ["done"] * 3
        assert [made.prompt for made in server.requests] == ["a bad question", "cut", "queued"]
        assert (server.requests[-1].json["model"], server.requests[-1].json["temperature"]) == ("another", 0.5)
        again = lane.submit("a question", key="first")
        assert (again["id"], again["replayed"]) == (1, True)
        assert lane.submit("new")["id"] == 9
    verified = subprocess.run(
        [sys.executable, "-m", "brainlaned", "--verify", "--state-dir", tmp_path / "state"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert verified.returncode == 0, verified.stdout


def _check_what_was_kept(lane: Lane) -> None:
    first = lane.get("/v1/jobs/1").json
    assert (first["labels"], first["priority"], first["key"]) == ({"batch": "one"}, "high", "first")
    assert [attempt["status"] for attempt in first["attempts"]] == ["succeeded"]
    assert lane.get("/v1/jobs/1/output").body == b"hello world"
    assert lane.get("/v1/jobs/1/response").json["choices"][0]["message"]["content"] == "hello world"
    assert lane.get("/v1/jobs/1/request").json["messages"][0]["content"] == "a question"
    assert b"hello".startswith(lane.get("/v1/jobs/3/output?partial=1").body[:5])
    decided = lane.get("/v1/jobs/4").json
    assert [(made["action"], made["reason"]) for made in decided["decisions"]] == [("accept", "it will do")]
    assert decided["flags"] == ["partial"]
    assert lane.get("/v1/jobs/5/output").body == b"by hand"
    assert lane.get("/v1/jobs/6").json["waiting"] == "lane-paused"
    assert lane.get("/v1/jobs/8").json["decisions"][0]["reason"] == "changed my mind"
    seen = lane.rows("select id, status, waiting, next_action from operator_view order by id")
    assert [row["id"] for row in seen] == list(range(1, 9))
    assert all(row["next_action"] for row in seen)
