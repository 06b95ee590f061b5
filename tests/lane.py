"""A real brainlaned for the tests: started as a process of its own in a temporary place, spoken to over its socket.

`Lane` writes a configuration, starts the daemon (through `tests.observed` where a cut is to be observed), waits until
it answers, and stops it by its process id. `Lane.ask` is a bare HTTP client over the socket.
"""

import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.brainserver import BrainServer, Held, Step

START_S = 20.0


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("lane", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(os.fspath(self._path))


class Answer:
    """One answer: `status`, `headers`, `body`, and the parsed `json` where it is JSON."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


class Lane:
    """A lane in `directory`. The daemon is not running until `start`."""

    def __init__(self, directory: Path, config: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.state_dir = directory / "state"
        self.socket = directory / "s"
        self.config = directory / "brainlaned.toml"
        self.log = directory / "log"
        self._vanishing = directory / "vanishing"
        self.config.write_text(config, encoding="utf-8")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def database(self) -> Path:
        return self.state_dir / "brainlane.db"

    def command(self, *, cut: str | None = None, times: int = 1) -> list[str]:
        module = ["brainlaned"] if cut is None else ["tests.observed", f"{cut}:{times}", os.fspath(self._vanishing)]
        return [
            *(sys.executable, "-m", *module),
            *("--config", os.fspath(self.config)),
            *("--state-dir", os.fspath(self.state_dir)),
            *("--socket", os.fspath(self.socket)),
        ]

    def start(self, *, cut: str | None = None, times: int = 1, wait: bool = True) -> "Lane":
        """Start the daemon; with `cut` it kills itself when it passes that cut for the `times`th time in `vanish`."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(cut=cut, times=times), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        if wait:
            self.wait_until_ready()
        return self

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                if self.get("/v1/healthz").status == 200:
                    return
            except OSError:
                pass
            assert self.process is not None and self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"no answer within {START_S} s: {self.log.read_text()}"
            time.sleep(0.02)  # for the daemon to listen

    def stop(self, limit_s: float = 20.0) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def vanish(self, ask: Callable[[], object] | None = None) -> None:
        """Let a lane that was started with a cut pass it: open the lane, or `ask` for something else."""
        self._vanishing.touch()
        # It may vanish before it has answered, or in the middle of its answer.
        with suppress(OSError, http.client.HTTPException):
            (ask or (lambda: self.post("/v1/lane/resume")))()
        assert self.process is not None
        assert self.process.wait(20) == -signal.SIGKILL, self.log.read_text()
        self._vanishing.unlink()

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 70,
    ) -> Answer:
        connection = _Connection(self.socket, timeout_s)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Answer:
        return self.ask("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return self.ask("POST", path, {} if body is None else body, **options)

    def submit(
        self, prompt: str = "hello", *, request: Mapping[str, Any] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Submit a prompt and return the job object."""
        messages = [{"role": "user", "content": prompt}]
        answer = self.post("/v1/jobs", {"request": {"messages": messages, **(request or {})}, **fields})
        assert answer.status in {200, 201}, answer.body
        return answer.json

    def wait(self, job_id: int, limit_s: float = 30.0) -> dict[str, Any]:
        """Wait until a job is final or held, and return it."""
        deadline = time.monotonic() + limit_s
        while True:
            job = self.get(f"/v1/jobs/{job_id}?wait={max(0.0, min(50.0, deadline - time.monotonic())):.3f}").json
            if job["status"] not in {"queued", "running"}:
                return job
            assert time.monotonic() < deadline, job

    def wait_for_status(self, job_id: int, *statuses: str, limit_s: float = 20.0) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while True:
            job = self.get(f"/v1/jobs/{job_id}").json
            if job["status"] in statuses:
                return job
            assert time.monotonic() < deadline, job
            time.sleep(0.02)  # for the job to move

    def rows(self, sql: str, *params: Any) -> list[dict[str, Any]]:
        """Read the database as an operator with sqlite3 would."""
        connection = sqlite3.connect(self.database)
        connection.row_factory = sqlite3.Row
        try:
            return [dict(row) for row in connection.execute(sql, params)]
        finally:
            connection.close()


def config_for(base_url: str, *, lane: str = "", route: str = "", more: str = "") -> str:
    """A configuration with one route, `local`, and quick retries."""
    return f"""
[lane]
{lane}
[routes.local]
base_url = "{base_url}"
model = "test-model"
retry_first_s = 0.2
{route}
{more}
"""


@contextmanager
def write_lock_held(lane: Lane, *, timeout_s: float = 60) -> Iterator[None]:
    """Hold the database's write lock, as an operator's forgotten sqlite3 shell would."""
    with closing(sqlite3.connect(lane.database, timeout=timeout_s, isolation_level=None)) as foreign:
        foreign.execute("begin immediate")
        try:
            yield
        finally:
            foreign.execute("commit")


def wait_until(is_so: Callable[[], bool], limit_s: float = 60) -> None:
    """Wait for what a process does that has no way to tell us."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # for it to be so


def members_of(group: int) -> set[int]:
    """Return the processes of a process group that have not ended."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of_group) == group and state not in "ZX":
            found.add(int(stat.parent.name))
    return found


@contextmanager
def living(lane: Lane, let_go: Callable[[], None] = lambda: None) -> Iterator[Lane]:
    """Start a lane for the length of the body. It must then stop as it is told, and its log may hold no traceback.

    `let_go` ends what its brain holds, so that no call has to be waited for.
    """
    try:
        yield lane.start()
        let_go()
        assert lane.stop() == 0
    finally:
        let_go()
        if lane.process is not None and lane.process.poll() is None:
            lane.kill()
    assert "Traceback" not in lane.log.read_text()


def begin_call(
    lane: Lane, server: BrainServer, prompt: str = "think", then: Step | None = None
) -> tuple[dict[str, Any], Held]:
    """Begin a job whose request has been sent and recorded as sent, so that no row changes while its brain thinks."""
    held = server.hold(then)
    server.script(held)
    job = lane.submit(prompt)
    assert held.arrived.wait(60)
    wait_until(lambda: lane.get(f"/v1/jobs/{job['id']}").json["attempts"][0]["sent_at"] is not None)
    return job, held


@contextmanager
def running_lane(directory: Path, config: str) -> Iterator[Lane]:
    """A lane whose daemon runs for the length of the body, and is stopped by its process id."""
    lane = Lane(directory, config)
    try:
        yield lane.start()
    finally:
        if lane.process is not None and lane.process.poll() is None:
            try:
                lane.stop()
            except subprocess.TimeoutExpired:
                lane.kill()
                raise
