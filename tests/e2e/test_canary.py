"""A key that whoever reads over the operator's shoulder would know at once: it may be found nowhere.

Each lane of these tests has the key in one of the places where a configuration can have one. The brain does all that
it can to have it written down, calls fail in every way, the process dies in the middle of an answer; then everything
that the daemon wrote, said or shows is searched for the key in each of its spellings.
"""

import base64
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests import brainserver
from tests.brainserver import BrainServer, Exchange, Step, chunk, delta, event, head
from tests.lane import Lane

KEY = "CANARY-3f9/key+1"
WRITTEN = quote(KEY, safe="")
"""The key as an address has to spell it."""

LIMIT_S = 60.0


def spellings(key: str) -> set[bytes]:
    """Return the forms in which the key must not be found."""
    plain = [key, quote(key, safe=""), quote(key), quote(quote(key, safe=""), safe=""), key.replace("/", "\\/")]
    packed = [f"{before}{each}" for each in (key, quote(key, safe="")) for before in ("", "me:", "Bearer ")]
    # The last characters of base64 depend on what follows, so they are left out.
    return {each.encode() for each in plain} | {base64.b64encode(each.encode()).rstrip(b"=")[:-1] for each in packed}


# Where a key may be


@dataclass(frozen=True)
class Hidden:
    """A way to give a lane its key: what its routes' address, proxy and further lines are then."""

    user_info: str = ""
    query: str = ""
    proxy: bool = False
    lines: str = ""
    spelled: tuple[str, ...] = (KEY,)
    """How a brain that got it may spell it."""

    def route(self, name: str, port: int, *, scheme: str = "http", more: str = "") -> str:
        address = "brain.invalid" if self.proxy else f"{self.user_info}127.0.0.1:{port}"
        proxy = f'proxy = "http://me:{WRITTEN}@127.0.0.1:{port}"' if self.proxy else ""
        return f"""
[routes.{name}]
base_url = "{scheme}://{address}/v1{self.query}"
model = "test-model"
retry_first_s = 0.2
{proxy}
{self.lines}
{more}
"""


HIDDEN = {
    "a key file": Hidden(lines='api_key_file = "KEY_FILE"'),
    "a credential": Hidden(lines='api_key = "openai"'),
    "the query": Hidden(query=f"?key={WRITTEN}", spelled=(KEY, WRITTEN)),
    "the password": Hidden(user_info=f"me:{WRITTEN}@", spelled=(KEY, WRITTEN)),
    "a header": Hidden(lines=f'headers = {{ X-Api-Key = "{KEY}" }}'),
    "the proxy's password": Hidden(proxy=True, spelled=(WRITTEN,)),
}


@dataclass
class Site:
    """A lane with a hidden key, the brain that it asks, and one that it must never ask."""

    lane: Lane
    server: BrainServer
    other: BrainServer
    jobs: list[int] = field(default_factory=list)

    def run(self, prompt: str, *, route: str = "local", **fields: Any) -> dict[str, Any]:
        """Submit a job, wait until its first attempt has ended, and open the gate that this may have closed."""
        job_id = self.lane.submit(prompt, route=route, max_attempts=1, **fields)["id"]
        self.jobs.append(job_id)
        deadline = time.monotonic() + LIMIT_S
        while True:
            job = self.lane.get(f"/v1/jobs/{job_id}").json
            if job["attempts"] and job["attempts"][0]["ended_at"] is not None:
                break
            assert time.monotonic() < deadline, job
            time.sleep(0.02)  # for the attempt to end, whatever the job then is
        if job["status"] == "queued":
            self.lane.post(f"/v1/jobs/{job_id}/cancel")
            self.lane.post("/v1/lane/resume", {"route": route})
        return job

    def found(self) -> list[str]:
        """Search everything, and return where the key was found, and as what."""
        texts = {**on_disk(self.lane), **of_the_process(self.lane), **over_http(self.lane, self.jobs)}
        texts["brainctl"] = by_brainctl(self.lane, self.jobs)
        return [
            f"{form!r} in {where}: {text[max(0, text.index(form) - 80) : text.index(form) + 40]!r}"
            for where, text in texts.items()
            for form in spellings(KEY)
            if form in text
        ]


MakeSite = Callable[..., Site]


@pytest.fixture
def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSite]:
    """Start a lane whose key is hidden in the given way; `local` is its usual route."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for name in ("key", "openai"):
        (secrets / name).write_text(f"{KEY}\n")
        (secrets / name).chmod(0o600)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(secrets))

    with BrainServer() as server, BrainServer() as other, contextlib.ExitStack() as stack:
        no_tls, refusing = stack.enter_context(speaking_plainly()), stack.enter_context(brainserver.refuse())

        def make(hidden: Hidden) -> Site:
            tls_port = server.port if hidden.proxy else no_tls
            config = "\n".join(
                [
                    '[lane]\ndefault_route = "local"',
                    hidden.route("local", server.port),
                    hidden.route("slow", server.port, more="first_byte_s = 0.3"),
                    hidden.route("tls", tls_port, scheme="https"),
                    hidden.route("gone", int(refusing.split(":")[2].split("/")[0])),
                ]
            ).replace("KEY_FILE", str(secrets / "key"))
            site = Site(Lane(tmp_path / "lane", config), server, other)
            stack.callback(end, site)
            site.lane.start()
            return site

        yield make


def end(site: Site) -> None:
    site.server.release()
    if site.lane.process is not None and site.lane.process.poll() is None:
        try:
            site.lane.stop()
        except subprocess.TimeoutExpired:
            site.lane.kill()
            raise
    assert "Traceback" not in site.lane.log.read_text(errors="replace")


@contextlib.contextmanager
def speaking_plainly() -> Iterator[int]:
    """Give a port at which whoever wants to speak TLS is answered in plain text, with the key in it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with line, contextlib.suppress(OSError):
                line.recv(65536)
                line.sendall(f"HTTP/1.1 400 {KEY}\r\n\r\n{KEY}".encode())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        thread.join()
        listener.close()


# What is searched


def on_disk(lane: Lane) -> dict[str, bytes]:
    """Return the log, the database with its side files, and the spool."""
    files = [lane.log, *(path for path in lane.state_dir.rglob("*") if path.is_file())]
    return {str(path.relative_to(lane.directory)): path.read_bytes() for path in files}


def of_the_process(lane: Lane) -> dict[str, bytes]:
    assert lane.process is not None
    place = Path(f"/proc/{lane.process.pid}")
    return {name: (place / name).read_bytes() for name in ("cmdline", "environ")}


def over_http(lane: Lane, jobs: list[int]) -> dict[str, bytes]:
    """Return the answer, headers included, of every endpoint that shows something of these jobs or of the lane."""
    asked = [("GET", path) for path in ("/v1/jobs?limit=500", "/v1/status", "/v1/healthz", "/v1/nothing")]
    for job_id in jobs:
        path = f"/v1/jobs/{job_id}"
        shown = ["", "/output", "/output?partial=1", "/response"]
        if lane.get(path).json["status"] != "running":
            shown.append("/stream")  # which would last as long as the job
        asked += [("GET", path + end) for end in shown]
        asked += [("POST", path + end) for end in ("/cancel", "/recover")]
    answers = {}
    for method, path in asked:
        body = {"attempt": 999, "action": "accept"} if path.endswith("/recover") else {}
        if path.endswith("/cancel"):
            body = {"attempt": 999}  # refused, with words about the job
        answer = lane.ask(method, path, body if method == "POST" else None)
        assert answer.status < 500, (path, answer.body)
        answers[f"{method} {path}"] = str(answer.headers).encode() + answer.body
    return answers


MANY_COMMANDS = """
import json, sys
from brainctl.__main__ import main
for words in json.loads(sys.argv.pop()):
    sys.argv[1:] = words
    print("exit status", main(), flush=True)
"""


def by_brainctl(lane: Lane, jobs: list[int]) -> bytes:
    """Return all that brainctl prints about the lane and these jobs. One process runs the many commands."""
    asked = [["list"], ["status"], ["recover"], *([verb, str(job)] for job in jobs for verb in ("show", "output"))]
    asked += [["output", "--partial", str(job)] for job in jobs]
    commands = [["--socket", str(lane.socket), *how, *words] for words in asked for how in ([], ["--json"])]
    done = subprocess.run(
        [sys.executable, "-c", MANY_COMMANDS, json.dumps(commands)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stdout.count(b"exit status 0") >= 6, done.stdout
    assert b"Traceback" not in done.stdout
    return done.stdout


# What the brain does


def echo_all(words: str, other: BrainServer) -> dict[str, tuple[Step, tuple[str, str]]]:
    """Return answers that have the words in them, by the prompt that provokes each, with what becomes of its job."""
    stream = b"".join(brainserver.sse(tokens=["Your key is ", words, ", is it not?"]))
    error = {"message": f"wrong key: {words}", "type": words, "param": {words: words}}
    return {
        "400": (
            brainserver.status(400, {"error": {**error, "code": words}}, headers={"X-Request-Id": words}),
            ("failed", "bad-request"),
        ),
        "401": (brainserver.status(401, {"error": error}), ("queued", "route-refused")),
        "404": (brainserver.status(404, f"<p>{words}</p>", content_type=f"text/{words}"), ("queued", "route-refused")),
        "429": (
            brainserver.status(429, {"error": error}, headers={"Retry-After": words, "Date": words}),
            ("queued", "asked-to-wait"),
        ),
        "500": (brainserver.status(500, words * 60), ("failed", "attempts-exhausted")),
        "redirect": (brainserver.redirect(f"{other.base_url}?key={words}"), ("queued", "route-refused")),
        "no header": (
            brainserver.raw(f"HTTP/1.1 200 OK\r\n{words}\r\n\r\n"),
            ("held", "sent-outcome-unknown"),
        ),
        "no status line": (brainserver.raw(f"HTTP/1.1 {words}\r\n\r\n"), ("held", "sent-outcome-unknown")),
        "encoded": (brainserver.json_answer("x", headers={"Content-Encoding": words}), ("held", "answer-incomplete")),
        "no answer": (brainserver.raw_events([], headers={"Request-Id": words}), ("held", "answer-unreadable")),
        "a page": (
            brainserver.status(200, f"<title>{words}</title>", content_type="text/html"),
            ("held", "answer-unreadable"),
        ),
        "an error inside": (brainserver.error_in_200({**error, "code": 500}), ("failed", "attempts-exhausted")),
        "an error after text": (
            brainserver.stream_then_error(["Your key is ", words], error),
            ("held", "answer-incomplete"),
        ),
        "a stream": (brainserver.raw_events([stream]), ("done", "answered")),
        "a stream byte by byte": (brainserver.bytewise(stream), ("done", "answered")),
        "a stream in small chunks": (
            brainserver.raw_events([stream[start : start + 5] for start in range(0, len(stream), 5)], gap_s=0.001),
            ("done", "answered"),
        ),
        "a plain answer": (brainserver.json_answer(f"Your key is {words}."), ("done", "answered")),
        "a reason to finish": (brainserver.answer("x", finish=words, usage={words: 1}), ("done", "answered")),
    }


def dying_word(server: BrainServer, words: str) -> Step:
    """Make a step that streams the words, cut within, and a last event that it does not end."""
    said = delta(f"Your key is {words}, is it not?") + event({"id": words})[:-1]
    middle = said.index(words.encode()) + 5
    held = server.hold()

    def step(x: Exchange) -> None:
        x.read_body()
        x.send(head(chunked=True) + chunk(said[:middle]))
        x.send(chunk(said[middle:]))
        held(x)

    return step


@pytest.mark.parametrize("place", HIDDEN)
def test_a_key_that_the_brain_echoes_in_every_way_is_found_nowhere(place: str, make_site: MakeSite) -> None:
    site = make_site(HIDDEN[place])
    answers = {
        f"{prompt} ({number})": answer
        for number, words in enumerate(HIDDEN[place].spelled)
        for prompt, answer in echo_all(words, site.other).items()
    }
    site.server.by_prompt(lambda prompt: answers[prompt or ""][0])
    for prompt, (_, end) in answers.items():
        job = site.run(prompt)
        assert (job["status"], job["reason"]) == end, (prompt, job)
    assert any(key_arrived(each) for each in site.server.requests), "the brain never got the key"
    assert site.found() == []
    assert (site.other.connections, site.other.requests) == (0, [])


def key_arrived(record: brainserver.Record) -> bool:
    got = f"{record.path} {record.headers}".encode()
    return any(form in got for form in spellings(KEY))


@pytest.mark.parametrize("place", HIDDEN)
def test_a_key_is_found_nowhere_after_calls_that_came_to_nothing_and_a_crash(place: str, make_site: MakeSite) -> None:
    site = make_site(HIDDEN[place])
    words = HIDDEN[place].spelled[0]
    steps = {"silence": brainserver.silence(), "crash": dying_word(site.server, words)}
    site.server.by_prompt(lambda prompt: steps[prompt or ""])
    late = site.run("silence", route="slow")
    assert (late["status"], late["reason"]) == ("held", "sent-outcome-unknown")
    for route in ("tls", "gone"):
        job = site.run("nothing", route=route)
        assert (job["status"], job["reason"]) == ("queued", "not-sent"), job
        assert job["attempts"][0]["armed_at"] is None

    dying = site.lane.submit("crash")["id"]
    site.jobs.append(dying)
    deadline = time.monotonic() + LIMIT_S
    while not (part := site.lane.get(f"/v1/jobs/{dying}/output?partial=1")).body.startswith(b"Your key is "):
        assert time.monotonic() < deadline, part.body
        time.sleep(0.02)  # for the first event to be in the spool
    assert any(path.startswith("state/spool/") for path in on_disk(site.lane))
    assert site.found() == []
    site.lane.kill()
    spooled = {where: text for where, text in on_disk(site.lane).items() if "spool" in where}
    assert b"Your key is " in b"".join(spooled.values())
    site.lane.start()
    job = site.lane.wait(dying)
    assert (job["status"], job["reason"]) == ("held", "answer-incomplete")
    assert site.found() == []


# The same, dressed up


@pytest.mark.parametrize("place", HIDDEN)
def test_a_request_that_is_echoed_as_it_came_gives_no_key_away(place: str, make_site: MakeSite) -> None:
    site = make_site(HIDDEN[place])

    def echo(x: Exchange) -> None:
        x.read_body()
        said = {"request": f"{x.record.method} {x.record.path}", "headers": x.record.headers}
        refused = x.record.prompt == "refused"
        brainserver.status(400, {"error": {"message": json.dumps(said)}})(x) if refused else brainserver.answer(
            json.dumps(said)
        )(x)

    site.server.default = echo
    assert site.run("refused")["status"] == "failed"
    assert site.run("answered")["status"] == "done"
    assert site.found() == []


@pytest.mark.parametrize("middle", [6, len(KEY) - 1])
def test_a_key_that_comes_in_two_deltas_is_not_put_together(middle: int, make_site: MakeSite) -> None:
    site = make_site(HIDDEN["a key file"])
    site.server.default = brainserver.answer(tokens=["Your key is ", KEY[:middle], KEY[middle:], "."])
    assert site.run("tell me")["status"] == "done"
    assert site.found() == []


SLASH, HYPHEN = KEY.replace("/", "\\/"), KEY.replace("-", "\\u002d")


@pytest.mark.parametrize(
    ("code", "spelled"),
    [(200, SLASH), (200, HYPHEN), (400, SLASH), (400, HYPHEN)],
)
def test_a_key_that_json_spells_in_another_way_is_not_read_out(code: int, spelled: str, make_site: MakeSite) -> None:
    site = make_site(HIDDEN["a key file"])
    message = json.dumps({"role": "assistant", "content": "Your key is THIS."}).replace("THIS", spelled)
    body = f'{{"choices": [{{"index": 0, "message": {message}, "finish_reason": "stop"}}]}}'
    if code == 400:
        body = f'{{"error": {{"message": "wrong key: {spelled}"}}}}'
    assert KEY in json.dumps(json.loads(body))
    site.server.default = brainserver.status(code, body)
    assert site.run("tell me")["status"] == {200: "done", 400: "failed"}[code]
    assert site.found() == []


def test_a_key_within_a_header_is_a_key_without_the_words_around_it(make_site: MakeSite) -> None:
    site = make_site(Hidden(lines=f'headers = {{ Authorization = "Bearer {KEY}" }}'))
    site.server.default = brainserver.status(400, {"error": {"message": f"wrong key: {KEY}"}})
    assert site.run("tell me")["status"] == "failed"
    assert site.found() == []


def test_a_proxys_password_is_one_in_both_of_its_spellings(make_site: MakeSite) -> None:
    site = make_site(HIDDEN["the proxy's password"])
    site.server.default = brainserver.status(400, {"error": {"message": f"wrong password: {KEY}"}})
    assert site.run("tell me")["status"] == "failed"
    assert site.found() == []


# A configuration that cannot be used

PASTED = "CANARY-3f9-key"


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(f'api_keys = "{PASTED}"', id="a misspelled name"),
        pytest.param(f"api_key = {PASTED}", id="no quotes"),
        pytest.param(f'api_key = "{PASTED}', id="half a quote"),
        pytest.param(f'headers = {{ X-Api-Key = "{PASTED}\\u00e9" }}', id="a header with more than ASCII"),
        pytest.param('api_key_file = "OPEN_FILE"', id="a file that others may read"),
        pytest.param('api_key_file = "LONG_FILE"', id="a file of two lines"),
        pytest.param(f'proxy = "me:{PASTED}@127.0.0.1:1"', id="a proxy without a scheme"),
        pytest.param(f'base_url = "http://me:{PASTED}@127.0.0.1:99999/v1?key={PASTED}"', id="a port too high"),
        pytest.param(f'base_url = "http://me:{PASTED}@/v1"', id="no host"),
        pytest.param(f'api_key = "{PASTED}"', id="the key instead of its name"),
        pytest.param(f'api_key = ["{PASTED}"]', id="a list of keys"),
        pytest.param(f'headers = {{ X-Api-Key = ["{PASTED}"] }}', id="a list as a header"),
        pytest.param(f'proxy = ["http://me:{PASTED}@127.0.0.1:1"]', id="a list of proxies"),
        pytest.param(f'base_url = "http://me:{PASTED}/x@127.0.0.1:1/v1"', id="a slash in the password"),
        pytest.param(f'base_url = "http://me:{PASTED}#x@127.0.0.1:1/v1"', id="a hash in the password"),
        pytest.param(f'proxy = "http://me:{PASTED}/x@127.0.0.1:1"', id="a slash in the proxy's password"),
    ],
)
def test_a_refused_configuration_is_explained_without_the_key(line: str, tmp_path: Path) -> None:
    for name, text, mode in (("open", PASTED, 0o644), ("long", f"{PASTED}\nmore", 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    line = line.replace("OPEN_FILE", str(tmp_path / "open")).replace("LONG_FILE", str(tmp_path / "long"))
    address = "" if line.startswith("base_url") else 'base_url = "http://127.0.0.1:1/v1"'
    lane = Lane(tmp_path / "lane", f'[routes.local]\nmodel = "m"\n{address}\n{line}\n')
    lane.start(wait=False)
    assert lane.process is not None
    assert lane.process.wait(LIMIT_S) == 78
    said = lane.log.read_text()
    assert "routes.local" in said or re.search("line 4", said), said
    assert "CANARY" not in said, said
