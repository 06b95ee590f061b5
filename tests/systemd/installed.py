"""brainlane as it is installed in a machine: its lanes, and the brain beside them.

`InstalledLane` is a lane that systemd runs inside, `Brain` the fault server (tests.brainserver) as a unit of its own.
Both are spoken to from outside, without a process inside for each question; where the question is what brainctl says,
`InstalledLane.brainctl` runs the one that was installed.
"""

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from brainlaned.wire import Reason
from tests.lane import Lane, config_for
from tests.systemd.machine import Machine, Result, wait_until

MEMBER, STRANGER = "member", "stranger"
"""Users that every machine with brainlane has: one of the group brainlane, one who is not."""

TESTS_INSIDE, PACKAGE_INSIDE = "/mnt/tests", "/mnt/package"
ANSWER_S = 60.0
MOVED_S = 60.0

only_debian13 = pytest.mark.parametrize("debian", [13], ids=["debian13"], indirect=True)


class Brain:
    """The brain inside a machine, on the port of the route that the configuration has by default."""

    port = 8377
    base_url = f"http://127.0.0.1:{port}/v1"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def start(self) -> "Brain":
        program = f"{TESTS_INSIDE}/brainserver.py"
        self._machine.start_unit("brain", "python3", program, "--port", str(self.port))
        wait_until(self._listens, "the brain listens")
        return self

    def obey(self, **orders: Any) -> None:
        """Say what happens to the next requests, as `BrainServer.control` understands it."""
        self._ask("POST", "/__control__", orders)

    def release(self) -> None:
        """Let all that is held go on."""
        self._ask("POST", "/__release__", {})

    @property
    def requests(self) -> list[dict[str, Any]]:
        """What it was asked, the oldest first."""
        return [each for each in self._seen()["requests"] if each["method"] == "POST"]

    @property
    def max_concurrent(self) -> int:
        return self._seen()["max_concurrent"]

    def prompts(self) -> list[str]:
        return [each["prompt"] for each in self.requests]

    def wait_for(self, *prompts: str) -> None:
        """Wait until it has been asked exactly these, in this order."""
        wait_until(lambda: self.prompts() == list(prompts), f"the brain is asked {prompts}", MOVED_S)

    def _seen(self) -> Any:
        return self._ask("GET", "/__requests__", None)

    def _listens(self) -> bool:
        try:
            self._seen()
        except ConnectionRefusedError:
            return False
        return True

    def _ask(self, method: str, path: str, body: Any) -> Any:
        connection = http.client.HTTPConnection("brain", timeout=ANSWER_S)
        connection.sock = self._machine.connect(self.port)
        connection.sock.settimeout(ANSWER_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            found = json.loads(response.read())
            assert response.status == 200, found
            return found
        finally:
            connection.close()


class InstalledLane(Lane):
    """A lane inside a machine; of what `Lane` offers, only asking. systemd starts and stops it."""

    def __init__(self, machine: Machine, name: str | None = None) -> None:  # nothing of ours is to be started
        self.machine = machine
        self.name = name
        self.brain = Brain(machine)
        self.unit = f"brainlaned@{name}" if name else "brainlaned"
        self.place = f"brainlane-{name}" if name else "brainlane"
        self.state = f"/var/lib/{self.place}"

    @property
    def socket(self) -> Path:  # type: ignore[override]
        return self.machine.root / "run" / self.place / "control.sock"

    def configure(self, text: str | None = None, **parts: str) -> None:
        """Write its configuration: a text, or that of `config_for`, with the brain of this machine."""
        name = f"{self.name or 'brainlaned'}.toml"
        self.machine.put(f"/etc/brainlane/{name}", text or config_for(self.brain.base_url, **parts))

    def drop_in(self, *lines: str, unit: str | None = None) -> None:
        """Change its service (or another unit) as an administrator would; the latest of these holds."""
        unit = unit or f"{self.unit}.service"
        self.machine.put(f"/etc/systemd/system/{unit}.d/test.conf", "\n".join([*lines, ""]))
        self.machine.systemctl("daemon-reload")

    def shipped_drop_in(self, name: str) -> None:
        """Install a drop-in that came with the package, as its first lines say."""
        source = f"/usr/share/doc/brainlane/drop-ins/{name}.conf"
        self.machine.run("install", "-D", source, f"/etc/systemd/system/{self.unit}.service.d/{name}.conf")
        self.machine.systemctl("daemon-reload")

    def undo_drop_in(self, unit: str | None = None) -> None:
        self.machine.run("rm", f"/etc/systemd/system/{unit or f'{self.unit}.service'}.d/test.conf")
        self.machine.systemctl("daemon-reload")

    def start(self) -> "InstalledLane":  # type: ignore[override]
        self.machine.systemctl("start", self.unit)
        return self

    def brainctl(
        self, *argv: str, user: str | None = None, check: bool = True, input: str | None = None, env: Any = None
    ) -> Result:
        lane = ["--lane", self.name] if self.name else []
        # A machine among several on a busy computer may need longer than the few seconds that a person would wait.
        return self.machine.run(
            *("brainctl", *lane, "--answer-within", str(ANSWER_S), *argv), user=user, check=check, input=input, env=env
        )

    def show(self, *names: str) -> dict[str, str]:
        return self.machine.show(f"{self.unit}.service", *names)

    def starts(self) -> int:
        """How often systemd has begun to start its service, in all boots."""
        return len(self.journal("MESSAGE_ID=7d4958e842da4a758f6c1cdc7b36dcc5"))

    def main_pid(self) -> str:
        return self.show("MainPID")["MainPID"]

    def journal(self, *matches: str) -> list[dict[str, Any]]:
        return self.machine.journal(f"{self.unit}.service", *matches)

    def said(self) -> str:
        """Everything in the journal of its service, systemd's words about it too."""
        return "\n".join(str(entry.get("MESSAGE")) for entry in self.journal())

    def has_moved(self, job_id: int, *statuses: str) -> dict[str, Any]:
        """Wait until a job stands there, through restarts of the lane, and return it with its attempts."""
        return self.wait_for_status(job_id, *statuses, limit_s=MOVED_S)

    def answered(self, prompt: str = "still there?") -> dict[str, Any]:
        """Have a new job answered, as a sign that all is well, and return it."""
        job = self.wait(self.submit(prompt)["id"], MOVED_S)
        assert (job["status"], job["reason"]) == ("done", Reason.ANSWERED), job
        return job

    def call_in_flight(self, prompt: str = "long", **fields: Any) -> dict[str, Any]:
        """Have a job whose call the brain holds until it is released, and return it once the brain has it."""
        self.brain.obey(by_prompt={prompt: "hold"})
        job = self.submit(prompt, **fields)
        wait_until(lambda: prompt in self.brain.prompts(), "the brain has the call", MOVED_S)
        # The mark is written a moment after the request has left.
        wait_until(lambda: self.attempt(job["id"])["sent_at"] is not None, "the call is recorded as sent", MOVED_S)
        return job

    def attempt(self, job_id: int) -> dict[str, Any]:
        """Return the latest attempt at a job."""
        return self.get(f"/v1/jobs/{job_id}").json["attempts"][-1]
