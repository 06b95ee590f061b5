"""`brainlaned --check-config`: what it finds out about each route, and that it sends no prompt."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.brainserver import BrainServer, Step, html_page, json_answer, raw, redirect, status
from tests.lane import config_for


def check(tmp_path: Path, configuration: str) -> tuple[int, list[str], str]:
    """Run it; return exit status, lines, and what it said on stderr."""
    file = tmp_path / "brainlaned.toml"
    file.write_text(configuration, encoding="utf-8")
    made = subprocess.run(
        [sys.executable, "-m", "brainlaned", "--config", str(file), "--check-config"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "Traceback" not in made.stderr
    return made.returncode, made.stdout.splitlines(), made.stderr


def models(*names: str) -> Step:
    return lambda x: x.whole({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


def test_a_route_that_serves_its_model_is_well_and_no_prompt_is_sent(server: BrainServer, tmp_path: Path) -> None:
    server.models = models("other", "test-model")
    status_, lines, said = check(tmp_path, config_for(server.base_url))
    assert (status_, said) == (0, "")
    assert lines == [f"route local: ok: {server.base_url}: it has model 'test-model'"]
    assert server.count() == 0
    assert [each.path for each in server.requests] == ["/v1/models"]


@pytest.mark.parametrize(
    ("step", "is_well", "finding"),
    [
        (models("a", "b"), False, "it does not list model 'test-model'; it lists a, b"),
        (models(*"abcdefg"), False, "it lists a, b, c, d, e, ..."),
        (models(), False, "it lists none"),
        (models("test-model:latest"), True, "it has model 'test-model'"),
        (status(401), False, "it wants a key (HTTP 401)"),
        (status(404), True, "has no list of models"),
        (status(500), False, "cannot be read (HTTP 500)"),
        (redirect("http://127.0.0.1:1/elsewhere"), False, "it redirects (HTTP 307)"),
        (html_page(), False, "cannot be read (HTTP 200)"),
        (json_answer(), False, "cannot be read (HTTP 200)"),
        (raw(b"what?\r\n\r\n"), False, "RemoteProtocolError"),
    ],
)
def test_what_an_endpoint_says_is_told_in_one_line(
    step: Step, is_well: bool, finding: str, server: BrainServer, tmp_path: Path
) -> None:
    server.models = step
    status_, (line,), said = check(tmp_path, config_for(server.base_url))
    assert finding in line
    assert (status_, line.startswith("route local: ok: ")) == (0 if is_well else 1, is_well)
    assert said == ""


def test_an_endpoint_that_is_down_and_a_command_that_is_missing_are_told_beside_what_is_well(tmp_path: Path) -> None:
    commands = """
    [routes.there]
    kind = "command"
    command = ["cat"]
    [routes.missing]
    kind = "command"
    command = ["no-such-program"]
    """
    status_, lines, _ = check(tmp_path, config_for("http://127.0.0.1:1/v1", more=commands))
    assert status_ == 1
    assert [line.split(":")[:2] for line in lines] == [
        ["route local", " WRONG"],
        ["route there", " ok"],
        ["route missing", " WRONG"],
    ]
    assert "refused" in lines[0] and "no such program" in lines[2]


def test_a_key_that_is_echoed_is_not_shown(server: BrainServer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("CANARY-123")
    key.chmod(0o600)
    server.models = models("CANARY-123")
    status_, lines, said = check(tmp_path, config_for(server.base_url, route=f'api_key_file = "{key}"'))
    assert status_ == 1 and "[removed]" in lines[0]
    assert "CANARY" not in "".join(lines) + said
    server.models = status(403)
    assert (
        "it refuses the key (HTTP 403)"
        in check(tmp_path, config_for(server.base_url, route=f'api_key_file = "{key}"'))[1][0]
    )


def test_what_is_wrong_in_itself_is_refused_as_at_a_start(tmp_path: Path) -> None:
    status_, lines, said = check(tmp_path, config_for("ftp://x"))
    assert (status_, lines) == (78, [])
    assert "routes.local.base_url" in said
