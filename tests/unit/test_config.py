import math
import os
from pathlib import Path
from typing import Any

import certifi
import pytest

from brainlaned import config, errors, wire
from brainlaned.config import Config, Route, Secret

CANARY = "CANARY-123-key"


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "brainlaned.toml"
    path.write_text(text, encoding="utf-8")
    return config.load(path)


def refusal(tmp_path: Path, text: str) -> str:
    """Return what is said about a configuration that is refused, with the status that systemd does not restart."""
    with pytest.raises(errors.StartRefused) as refused:
        load(tmp_path, text)
    assert refused.value.status is wire.DaemonExit.CONFIGURATION
    assert refused.value.next_action
    return str(refused.value)


def route_text(more: str = "", *, base_url: str = "http://127.0.0.1:8377/v1") -> str:
    return f'[routes.local]\nbase_url = "{base_url}"\nmodel = "m"\n{more}\n'


def route_of(tmp_path: Path, more: str = "", **options: str) -> Route:
    return load(tmp_path, route_text(more, **options)).routes["local"]


# What stands where nothing is said.


def test_without_a_file_there_is_one_local_route_with_the_documented_limits() -> None:
    found = config.load(None)
    assert list(found.routes) == [found.default_route] == ["local"]
    route = found.routes["local"]
    assert (route.base_url, route.model) == ("http://127.0.0.1:8377/v1", "smollm2-135m")
    assert (route.connect_s, route.first_byte_s, route.idle_s, route.total_s) == (10, 300, 120, 1800)
    assert (route.max_attempts, route.retry_first_s, route.retry_cap_s, route.max_output_mib) == (3, 2, 600, 32)
    assert (route.may_run_twice, route.api_key, route.proxy, route.ca_file) == (False, None, None, None)
    assert (found.stop_grace_s, found.crash_limit, found.max_queued) == (90, 2, 1_000_000)
    assert (found.disk_reserve_mib, found.keep_days, found.keep_payload_days) == (64, 30, 30)
    assert found.access.read == ()
    assert found.head_start_s == {"low": -3600, "normal": 0, "high": 3600}
    assert (found.access.observe, found.access.submit, found.access.operate) == (("@brainlane",), ("@brainlane",), ())


def test_an_empty_file_means_the_same_as_no_file(tmp_path: Path) -> None:
    assert repr(load(tmp_path, "")) == repr(config.load(None))


def test_every_documented_key_is_accepted(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        f"""
        [lane]
        default_route = "far"
        stop_grace_s = 5.5
        crash_limit = 4
        max_queued = 10
        disk_reserve_mib = 1
        keep_days = 7
        keep_payload_days = 0.5
        [lane.head_start_s]
        low = -10
        normal = 1
        high = 20.5
        [routes.far]
        kind = "openai"
        base_url = "https://brain.example/v1/"
        model = "large"
        may_run_twice = true
        max_attempts = 5
        retry_first_s = 0.5
        retry_cap_s = 60
        connect_s = 1
        first_byte_s = 2
        idle_s = 3
        total_s = 4
        max_output_mib = 8
        proxy = "http://proxy.example:3128"
        ca_file = "{certifi.where()}"
        headers = {{ X-Team = "blue" }}
        [routes.near]
        base_url = "http://127.0.0.1:1/v1"
        model = "small"
        [access]
        observe = ["alice"]
        submit = ["@writers", "bob"]
        operate = []
        """,
    )
    far = found.routes["far"]
    assert found.default_route == "far"
    assert (found.stop_grace_s, found.crash_limit, found.max_queued, found.keep_days) == (5.5, 4, 10, 7)
    assert found.head_start_s == {"low": -10, "normal": 1, "high": 20.5}
    assert far.base_url == "https://brain.example/v1"
    assert (far.may_run_twice, far.max_attempts, far.retry_first_s, far.max_output_mib) == (True, 5, 0.5, 8)
    assert (far.connect_s, far.first_byte_s, far.idle_s, far.total_s) == (1, 2, 3, 4)
    assert far.ca_file == Path(certifi.where())
    assert far.proxy is not None and far.proxy.reveal() == "http://proxy.example:3128"
    assert {name: value.reveal() for name, value in far.headers.items()} == {"X-Team": "blue"}
    assert (found.access.observe, found.access.submit) == (("alice",), ("@writers", "bob"))


# What is refused, and how.


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("colour = 1", "colour"),
        ("[lane]\nstop_grace = 5", "lane.stop_grace"),
        ("[lane.head_start_s]\nhighest = 5", "lane.head_start_s.highest"),
        ("[access]\nadmin = []", "access.admin"),
        (route_text("idle = 5"), "routes.local.idle"),
        (route_text("Idle_s = 5"), "routes.local.Idle_s"),
        ("[route.local]\nmodel = 'm'", "route"),
    ],
)
def test_an_unknown_key_is_refused_by_its_full_name(tmp_path: Path, text: str, key: str) -> None:
    said = refusal(tmp_path, text)
    assert f"{key} is not a key" in said
    assert os.fspath(tmp_path / "brainlaned.toml") in said


WHOLE = ("lane.crash_limit", "lane.max_queued", "lane.disk_reserve_mib", "route.max_attempts", "route.max_output_mib")
SECONDS = (
    "lane.stop_grace_s",
    "lane.keep_days",
    "lane.keep_payload_days",
    *(f"route.{name}_s" for name in ("connect", "first_byte", "idle", "total", "retry_first", "retry_cap")),
)
NUMBERS = ("lane.head_start_s.low", "lane.head_start_s.normal", "lane.head_start_s.high")


def with_key(key: str, value: str) -> tuple[str, str]:
    """Return a configuration in which one key has a value, and the key's full name."""
    table, _, name = key.rpartition(".")
    if table == "route":
        return route_text(f"{name} = {value}"), f"routes.local.{name}"
    return f"[{table}]\n{name} = {value}", key


@pytest.mark.parametrize("key", [*WHOLE, *SECONDS])
@pytest.mark.parametrize(("value", "shown"), [("0", "0"), ("-1", "-1")])
def test_a_limit_of_zero_or_less_is_refused(tmp_path: Path, key: str, value: str, shown: str) -> None:
    text, name = with_key(key, value)
    assert f"{name} is {shown}" in refusal(tmp_path, text)


@pytest.mark.parametrize("key", [*WHOLE, *SECONDS, *NUMBERS])
@pytest.mark.parametrize(("value", "shown"), [("true", "True"), ("false", "False"), ('"5"', "'5'"), ("[5]", "[5]")])
def test_what_is_no_number_is_refused_for_a_number(tmp_path: Path, key: str, value: str, shown: str) -> None:
    text, name = with_key(key, value)
    assert f"{name} is {shown}" in refusal(tmp_path, text)


@pytest.mark.parametrize("key", [*SECONDS, *NUMBERS])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "1e999"])
def test_a_number_without_an_end_is_refused(tmp_path: Path, key: str, value: str) -> None:
    text, name = with_key(key, value)
    assert f"{name} is {float(value)!r}" in refusal(tmp_path, text)


@pytest.mark.parametrize("key", [*WHOLE, *SECONDS, *NUMBERS])
def test_a_whole_number_that_no_float_can_hold_is_refused_by_name(tmp_path: Path, key: str) -> None:
    text, name = with_key(key, "1" + "0" * 400)
    assert f"{name} is 1000" in refusal(tmp_path, text)


@pytest.mark.parametrize("text", ["a = " + "1" * 5000, "a = " + "[" * 5000], ids=["digits", "nesting"])
def test_what_the_reader_of_toml_gives_up_on_is_refused_like_any_other_fault(tmp_path: Path, text: str) -> None:
    assert os.fspath(tmp_path / "brainlaned.toml") in refusal(tmp_path, text)


@pytest.mark.parametrize("key", WHOLE)
def test_a_fraction_is_refused_for_a_whole_number(tmp_path: Path, key: str) -> None:
    text, name = with_key(key, "1.5")
    assert f"{name} is 1.5" in refusal(tmp_path, text)


def test_prompts_and_answers_are_kept_as_long_as_the_record_where_nothing_else_is_said(tmp_path: Path) -> None:
    found = load(tmp_path, "[lane]\nkeep_days = 3")
    assert (found.keep_days, found.keep_payload_days) == (3, 3)
    found = load(tmp_path, "[lane]\nkeep_days = 3\nkeep_payload_days = 3")
    assert found.keep_payload_days == 3


@pytest.mark.parametrize("text", ["keep_days = 3\nkeep_payload_days = 3.5", "keep_payload_days = 31"])
def test_no_prompt_outlives_its_record(tmp_path: Path, text: str) -> None:
    said = refusal(tmp_path, f"[lane]\n{text}")
    assert "lane.keep_payload_days is 3" in said and "keep_days" in said


def test_nothing_is_kept_for_longer_than_dates_can_tell(tmp_path: Path) -> None:
    assert load(tmp_path, "[lane]\nkeep_days = 36500").keep_days == 36500
    for key in ("keep_days", "keep_payload_days"):
        assert f"lane.{key} is 36501" in refusal(tmp_path, f"[lane]\n{key} = 36501")


def test_head_starts_may_be_negative_or_nothing_at_all(tmp_path: Path) -> None:
    assert load(tmp_path, "[lane.head_start_s]\nlow = 0\nhigh = -5").head_start_s == {"low": 0, "normal": 0, "high": -5}


@pytest.mark.parametrize(
    ("more", "name", "shown"),
    [
        ('may_run_twice = "yes"', "routes.local.may_run_twice", "'yes'"),
        ("may_run_twice = 1", "routes.local.may_run_twice", "1"),
        ("kind = 3", "routes.local.kind", "3"),
        ('kind = "carrier-pigeon"', "routes.local.kind", "carrier-pigeon"),
        ("ca_file = 3", "routes.local.ca_file", "3"),
        ("api_key = 3", "routes.local.api_key", "must be a text"),
    ],
)
def test_a_wrong_type_is_refused_by_name_and_value(tmp_path: Path, more: str, name: str, shown: str) -> None:
    said = refusal(tmp_path, route_text(more))
    assert name in said
    assert shown in said


@pytest.mark.parametrize(
    ("text", "name", "shown"),
    [
        ('[access]\nobserve = "alice"', "access.observe", "'alice'"),
        ("[access]\nsubmit = [1]", "access.submit", "[1]"),
        ('[access]\noperate = [""]', "access.operate", "['']"),
        ('[access]\noperate = ["@"]', "access.operate", "['@']"),
    ],
)
def test_a_list_of_who_may_holds_names_only(tmp_path: Path, text: str, name: str, shown: str) -> None:
    assert f"{name} is {shown}" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "name", "shown"),
    [
        ("lane = 5", "lane", "5"),
        ("routes = 5", "routes", "5"),
        ("access = 'all'", "access", "all"),
        ("[routes]\nlocal = 5", "routes.local", "5"),
        ("[lane]\nhead_start_s = 5", "lane.head_start_s", "5"),
    ],
)
def test_what_is_no_table_is_refused_by_name_and_value(tmp_path: Path, text: str, name: str, shown: str) -> None:
    _, _, said = refusal(tmp_path, text).partition("brainlaned.toml")
    assert name in said
    assert shown in said


def test_headers_that_are_no_table_are_refused_without_showing_what_may_be_a_key(tmp_path: Path) -> None:
    said = refusal(tmp_path, route_text(f'headers = "{CANARY}"'))
    assert "routes.local.headers" in said
    assert CANARY not in said


@pytest.mark.parametrize("missing", ["base_url", "model"])
def test_a_route_without_an_address_or_a_model_is_refused(tmp_path: Path, missing: str) -> None:
    lines = [line for line in route_text().splitlines() if not line.startswith(missing)]
    assert f"routes.local.{missing} is missing" in refusal(tmp_path, "\n".join(lines))


def test_an_empty_model_is_refused(tmp_path: Path) -> None:
    text = '[routes.local]\nbase_url = "http://127.0.0.1:1/v1"\nmodel = ""'
    assert "routes.local.model is empty" in refusal(tmp_path, text)


def test_a_default_route_needs_its_route(tmp_path: Path) -> None:
    said = refusal(tmp_path, '[lane]\ndefault_route = "cloud"\n' + route_text())
    assert "lane.default_route is 'cloud'" in said


def test_the_only_route_is_the_default_one(tmp_path: Path) -> None:
    assert load(tmp_path, route_text().replace("local", "cloud")).default_route == "cloud"


def test_of_several_routes_the_default_must_be_named_or_called_local(tmp_path: Path) -> None:
    two = route_text() + route_text().replace("local", "cloud")
    assert load(tmp_path, two).default_route == "local"
    said = refusal(tmp_path, two.replace("local", "home"))
    assert "lane.default_route is 'local'" in said


@pytest.mark.parametrize("name", ['"a b"', '"-a"', '"a/b"', '"' + "a" * 64 + '"', '""'])
def test_a_route_has_a_name_that_fits_a_command_line(tmp_path: Path, name: str) -> None:
    assert f"routes.{name.strip(chr(34))}" in refusal(tmp_path, route_text().replace("local", name))


@pytest.mark.parametrize("port", ["70000", "65536", "-1", "0", "http"])
def test_a_port_out_of_range_is_refused(tmp_path: Path, port: str) -> None:
    said = refusal(tmp_path, route_text(base_url=f"http://brain:{port}/v1"))
    assert "routes.local.base_url" in said
    assert f"http://brain:{port}/v1" in said


@pytest.mark.parametrize("port", ["1", "65535"])
def test_a_port_in_range_is_accepted(tmp_path: Path, port: str) -> None:
    assert route_of(tmp_path, base_url=f"http://brain:{port}/v1").endpoint == f"http://brain:{port}/v1"


@pytest.mark.parametrize(
    "url", ["brain:8377/v1", "ftp://brain/v1", "http:///v1", "127.0.0.1", "unix:///run/x", "http://[::1/v1"]
)
def test_an_address_that_is_not_http_is_refused(tmp_path: Path, url: str) -> None:
    said = refusal(tmp_path, route_text(base_url=url))
    assert "routes.local.base_url" in said
    assert url in said


@pytest.mark.parametrize("url", [r"http://bra\u0001in/v1", r"http://brain/v\u007f1", r"http://brain/\u0000"])
def test_an_address_with_control_characters_is_refused_before_a_job_can_meet_it(tmp_path: Path, url: str) -> None:
    assert "routes.local.base_url" in refusal(tmp_path, route_text(base_url=url))


def test_a_certificate_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    said = refusal(tmp_path, route_text(f'ca_file = "{tmp_path}/none.pem"'))
    assert f"routes.local.ca_file is '{tmp_path}/none.pem'" in said


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding", "connection", "Accept-Encoding"])
def test_a_header_that_is_ours_to_set_is_refused(tmp_path: Path, name: str) -> None:
    assert f"routes.local.headers.{name}" in refusal(tmp_path, route_text(f'headers = {{ {name} = "x" }}'))


@pytest.mark.parametrize("value", [r'"a\nb"', '"é"', r'"a\u0000"'])
def test_a_header_that_cannot_be_sent_is_refused_without_showing_it(tmp_path: Path, value: str) -> None:
    said = refusal(tmp_path, route_text(f"headers = {{ X-A = {value} }}"))
    assert "routes.local.headers.X-A" in said
    assert value.strip('"') not in said


@pytest.mark.parametrize("name", ['"a b"', '"a:b"', '"é"', '""'])
def test_what_is_no_name_of_a_header_is_refused(tmp_path: Path, name: str) -> None:
    assert "routes.local.headers" in refusal(tmp_path, route_text(f'headers = {{ {name} = "x" }}'))


def test_a_file_that_is_no_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    assert "line 2" in refusal(tmp_path, "[lane]\ncrash_limit = = 3\n")


def test_a_null_is_no_way_to_switch_a_limit_off(tmp_path: Path) -> None:
    assert os.fspath(tmp_path) in refusal(tmp_path, route_text("total_s = null"))


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "brainlaned.toml"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(errors.StartRefused, match="byte 5 is not UTF-8"):
        config.load(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.StartRefused, match=r"none\.toml") as refused:
        config.load(tmp_path / "none.toml")
    assert refused.value.status is wire.DaemonExit.CONFIGURATION


# Secrets.


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "credentials"
    directory.mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", os.fspath(directory))
    return directory


@pytest.mark.parametrize("file", ["openai", "keys_openai"])
def test_a_key_is_found_by_name_among_the_credentials(tmp_path: Path, credentials: Path, file: str) -> None:
    (credentials / file).write_text(f"{CANARY}\n")
    key = route_of(tmp_path, 'api_key = "openai"').api_key
    assert key is not None and key.reveal() == CANARY


def test_the_credential_of_exactly_that_name_goes_first(tmp_path: Path, credentials: Path) -> None:
    (credentials / "openai").write_text("mine")
    (credentials / "keys_openai").write_text("other")
    key = route_of(tmp_path, 'api_key = "openai"').api_key
    assert key is not None and key.reveal() == "mine"


def test_a_credential_that_was_not_passed_is_refused_by_name(tmp_path: Path, credentials: Path) -> None:
    (credentials / "keys_other").touch()
    said = refusal(tmp_path, route_text('api_key = "openai"'))
    assert "routes.local.api_key names a credential that was not passed; there are: keys_other" in said


def test_without_credentials_a_key_by_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    said = refusal(tmp_path, route_text('api_key = "openai"'))
    assert "routes.local.api_key names a credential" in said
    assert "$CREDENTIALS_DIRECTORY" in said


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "."])
def test_the_name_of_a_credential_leads_nowhere_else(tmp_path: Path, credentials: Path, name: str) -> None:
    (tmp_path / "secret").write_text(CANARY)
    said = refusal(tmp_path, route_text(f'api_key = "{name}"'))
    assert "routes.local.api_key" in said
    assert CANARY not in said


@pytest.mark.parametrize("content", ["", "\n", "two\nlines", "caf\u00e9", "a\x00b"])
def test_a_credential_that_no_header_can_carry_is_refused_without_showing_it(
    tmp_path: Path, credentials: Path, content: str
) -> None:
    (credentials / "openai").write_text(content, encoding="utf-8")
    said = refusal(tmp_path, route_text('api_key = "openai"'))
    assert "routes.local.api_key" in said
    assert not content.strip() or content.strip() not in said


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_key_file_that_only_its_owner_reads_is_accepted(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text(CANARY)
    file.chmod(mode)
    key = route_of(tmp_path, f'api_key_file = "{file}"').api_key
    assert key is not None and key.reveal() == CANARY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text(CANARY)
    file.chmod(mode)
    said = refusal(tmp_path, route_text(f'api_key_file = "{file}"'))
    assert f"routes.local.api_key_file is '{file}'" in said
    assert "chmod 600" in said


def test_a_key_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert f"api_key_file is '{tmp_path}/none'" in refusal(tmp_path, route_text(f'api_key_file = "{tmp_path}/none"'))


def test_a_key_comes_from_one_place_only(tmp_path: Path, credentials: Path) -> None:
    said = refusal(tmp_path, route_text('api_key = "a"\napi_key_file = "b"'))
    assert "routes.local.api_key and routes.local.api_key_file" in said


def secret_route(tmp_path: Path) -> tuple[Config, list[str]]:
    file = tmp_path / "key"
    file.write_text("CANARY-bearer")
    file.chmod(0o600)
    more = f"""
        api_key_file = "{file}"
        proxy = "http://me:CANARY-proxy@proxy.example:3128"
        headers = {{ X-Key = "CANARY-header" }}
    """
    base_url = "http://CANARY-user:CANARY-password@brain.example:81/v1?key=CANARY-query"
    secrets = ["bearer", "proxy", "header", "password", "query"]
    return load(tmp_path, route_text(more, base_url=base_url)), [f"CANARY-{name}" for name in secrets]


def test_no_secret_stands_in_a_repr_or_in_the_shown_address(tmp_path: Path) -> None:
    found, secrets = secret_route(tmp_path)
    route = found.routes["local"]
    shown = [repr(found), str(found), repr(route), f"{route}", route.endpoint, repr(route.api_key), str(route.headers)]
    for secret in secrets:
        assert not any(secret in text for text in shown), secret
    assert route.endpoint == "http://brain.example:81/v1"


def test_everything_secret_is_listed_for_removal_the_longest_first(tmp_path: Path) -> None:
    found, secrets = secret_route(tmp_path)
    listed = found.routes["local"].secrets()
    assert set(secrets) <= set(listed)
    assert list(listed) == sorted(listed, key=len, reverse=True)


@pytest.mark.parametrize(
    ("more", "base_url", "secrets"),
    [
        ("", "http://user:CANARY@brain.example/v1", {"CANARY", "dXNlcjpDQU5BUlk="}),
        ("", "http://CANARY-token@brain.example/v1", {"CANARY-token"}),
        ("", "http://brain.example/v1?api-version=2024-02-01-preview", set()),
        ("", "http://brain.example/v1?code=CANARY-1234", {"CANARY-1234"}),
        ('proxy = "http://user:CAN%41RY@proxy.example"', "http://brain.example/v1", {"CANARY", "CAN%41RY"}),
        ('headers = {Authorization = "Token CANARY"}', "http://brain.example/v1", {"CANARY", "Token CANARY"}),
        ('headers = {HTTP-Referer = "https://myapp.example", X-Team = "blue"}', "http://brain.example/v1", set()),
    ],
)
def test_what_is_no_secret_does_not_vanish_from_answers(
    tmp_path: Path, more: str, base_url: str, secrets: set[str]
) -> None:
    listed = set(route_of(tmp_path, more, base_url=base_url).secrets())
    assert secrets <= listed
    assert listed.isdisjoint({"user", "https://myapp.example", "blue", "2024-02-01-preview"})
    assert bool(listed) == bool(secrets)


@pytest.mark.parametrize(
    ("base_url", "as_written", "as_meant"),
    [
        ("http://brain.example/v1?key=CANARY%2Fquery", "CANARY%2Fquery", "CANARY/query"),
        ("http://me:CANARY%2Fpassword@brain.example/v1", "CANARY%2Fpassword", "CANARY/password"),
    ],
)
def test_an_escaped_secret_is_removed_in_both_of_its_spellings(
    tmp_path: Path, base_url: str, as_written: str, as_meant: str
) -> None:
    assert {as_written, as_meant} <= set(route_of(tmp_path, base_url=base_url).secrets())


def test_a_wrong_address_is_refused_without_its_password_and_query(tmp_path: Path) -> None:
    said = refusal(tmp_path, route_text(base_url="ftp://me:CANARY-a@brain.example/v1?key=CANARY-b"))
    assert "routes.local.base_url is given, and must be an http:// or https:// address" in said
    assert "CANARY" not in said


def test_a_wrong_proxy_is_refused_without_showing_it(tmp_path: Path) -> None:
    said = refusal(tmp_path, route_text('proxy = "socks://me:CANARY-a@proxy.example"'))
    assert "routes.local.proxy" in said
    assert "CANARY" not in said


def test_a_secret_is_revealed_only_when_asked() -> None:
    secret = Secret(CANARY)
    assert CANARY not in f"{secret} {secret!r} {[secret]}"
    assert secret.reveal() == CANARY


@pytest.mark.parametrize(
    ("base_url", "shown"),
    [
        ("http://[::1]:8080/v1", "http://[::1]:8080/v1"),
        ("https://brain.example", "https://brain.example"),
        ("https://brain.example/a/b/", "https://brain.example/a/b"),
    ],
)
def test_the_endpoint_is_the_address_as_it_may_be_shown(tmp_path: Path, base_url: str, shown: str) -> None:
    assert route_of(tmp_path, base_url=base_url).endpoint == shown


def test_all_limits_of_a_route_are_finite_whatever_was_left_out(tmp_path: Path) -> None:
    route: Any = route_of(tmp_path)
    for name in ("connect_s", "first_byte_s", "idle_s", "total_s", "retry_first_s", "retry_cap_s", "max_output_mib"):
        value = getattr(route, name)
        assert math.isfinite(value) and value > 0, name


# Routes that are commands.


def command_text(more: str = "", command: str = '["llm", "-m", "x"]') -> str:
    return f'[routes.local]\nkind = "command"\ncommand = {command}\n{more}\n'


def test_a_command_needs_nothing_but_its_words(tmp_path: Path) -> None:
    route = load(tmp_path, command_text(command='["/usr/bin/llm", "", "-m", "a b"]')).routes["local"]
    assert route.command == ("/usr/bin/llm", "", "-m", "a b")
    assert (route.base_url, route.model, route.endpoint) == ("", "llm", "/usr/bin/llm")
    assert (dict(route.environment), dict(route.secret_environment), route.secrets()) == ({}, {}, ())
    assert route.exit_statuses == {75: "retry", 2: "fail"}
    assert (route.total_s, route.max_output_mib, route.max_attempts, route.may_run_twice) == (1800, 32, 3, False)


def test_every_key_of_a_command_is_accepted(tmp_path: Path, credentials: Path) -> None:
    (credentials / "the-key").write_text(f"{CANARY}\n")
    more = """
        model = "small"
        may_run_twice = true
        max_attempts = 1
        retry_first_s = 3
        retry_cap_s = 4
        total_s = 5
        max_output_mib = 6
        [routes.local.environment]
        A = "1 2"
        _EMPTY = ""
        NOTIFY_SOCKET = "named on purpose"
        [routes.local.secrets]
        KEY = "the-key"
        [routes.local.exit_status]
        1 = "retry"
        2 = "error"
        255 = "fail"
    """
    found = load(tmp_path, command_text(more))
    route = found.routes["local"]
    assert (route.model, route.may_run_twice, route.max_attempts) == ("small", True, 1)
    assert (route.retry_first_s, route.retry_cap_s, route.total_s, route.max_output_mib) == (3, 4, 5, 6)
    assert route.environment == {"A": "1 2", "_EMPTY": "", "NOTIFY_SOCKET": "named on purpose"}
    assert {name: value.reveal() for name, value in route.secret_environment.items()} == {"KEY": CANARY}
    assert route.secrets() == (CANARY,)
    assert route.exit_statuses == {75: "retry", 1: "retry", 2: "error", 255: "fail"}
    assert CANARY not in repr(found)


@pytest.mark.parametrize(
    ("text", "name", "cause"),
    [
        ('[routes.local]\nkind = "command"', "routes.local.command", "is missing"),
        (command_text(command="[]"), "routes.local.command", "is empty"),
        (command_text(command='[""]'), "routes.local.command", "is empty"),
        (command_text(command='"llm -m x"'), "routes.local.command", "must be a list of texts"),
        (command_text(command='["llm", 5]'), "routes.local.command", "must be a list of texts"),
        (command_text(command=r'["llm", "a\u0000"]'), "routes.local.command", "NUL"),
        ('[routes.local]\nkind = "shell"', "routes.local.kind", "'shell'"),
        (command_text("[routes.local.environment]\nA = 5"), "routes.local.environment.A", "must be a text"),
        (command_text("environment = 5"), "routes.local.environment", "must be a table"),
        (command_text('[routes.local.environment]\n"1A" = ""'), "routes.local.environment", "'1A'"),
        (command_text('[routes.local.environment]\n"A=B" = ""'), "routes.local.environment", "'A=B'"),
        (command_text('[routes.local.environment]\n"" = ""'), "routes.local.environment", "''"),
        (command_text(r"[routes.local.environment]" + '\nA = "\\u0000"'), "routes.local.environment.A", "NUL"),
        (command_text('[routes.local.secrets]\n"A-B" = "the-key"'), "routes.local.secrets", "'A-B'"),
        (command_text('[routes.local.secrets]\nA = ""'), "routes.local.secrets.A", "is empty"),
        (command_text('[routes.local.secrets]\nA = "../x"'), "routes.local.secrets.A", "not the name of a credential"),
        (
            command_text('[routes.local.secrets]\nA = "other"'),
            "routes.local.secrets.A",
            "a credential that was not passed",
        ),
        (
            command_text('[routes.local.environment]\nA = ""\n[routes.local.secrets]\nA = "other"'),
            "routes.local.secrets.A",
            "routes.local.environment",
        ),
        (command_text('[routes.local.exit_status]\n0 = "retry"'), "routes.local.exit_status", "'0'"),
        (command_text('[routes.local.exit_status]\n256 = "retry"'), "routes.local.exit_status", "'256'"),
        (command_text('[routes.local.exit_status]\n-9 = "retry"'), "routes.local.exit_status", "'-9'"),
        (command_text('[routes.local.exit_status]\nbusy = "retry"'), "routes.local.exit_status", "'busy'"),
        (command_text('[routes.local.exit_status]\n3 = "done"'), "routes.local.exit_status.3", "'done'"),
        (command_text("[routes.local.exit_status]\n3 = 75"), "routes.local.exit_status.3", "must be a text"),
        (command_text("exit_status = 75"), "routes.local.exit_status", "must be a table"),
    ],
)
def test_what_makes_no_command_is_refused_by_name(
    tmp_path: Path, credentials: Path, text: str, name: str, cause: str
) -> None:
    said = refusal(tmp_path, text)
    assert name in said and cause in said


@pytest.mark.parametrize(
    "line",
    [
        *('base_url = "http://127.0.0.1:1/v1"', 'api_key = "k"', 'api_key_file = "/k"', 'ca_file = "/c"'),
        *('proxy = "http://127.0.0.1:1"', "connect_s = 1", "first_byte_s = 1", "idle_s = 1", 'headers = {A = "b"}'),
    ],
)
def test_what_belongs_to_an_endpoint_is_refused_for_a_command(tmp_path: Path, line: str) -> None:
    name = line.partition(" ")[0]
    assert f"routes.local.{name} is not a key of the configuration" in refusal(tmp_path, command_text(line))


@pytest.mark.parametrize("line", ['command = ["llm"]', 'environment = {A = "b"}', "secrets = {}", "exit_status = {}"])
def test_what_belongs_to_a_command_is_refused_for_an_endpoint(tmp_path: Path, line: str) -> None:
    name = line.partition(" ")[0]
    assert f"routes.local.{name} is not a key of the configuration" in refusal(tmp_path, route_text(line))


def test_a_secret_for_a_command_needs_the_directory_of_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    said = refusal(tmp_path, command_text('[routes.local.secrets]\nKEY = "the-key"'))
    assert "routes.local.secrets.KEY names a credential" in said and "$CREDENTIALS_DIRECTORY" in said


@pytest.mark.parametrize("names", [("75", "075"), ("\u0667\u0665",)], ids=["twice", "of other digits"])
def test_an_exit_status_has_one_spelling(tmp_path: Path, names: tuple[str, ...]) -> None:
    lines = "\n".join(f'"{name}" = "fail"' for name in names)
    assert "routes.local.exit_status" in refusal(tmp_path, command_text(f"[routes.local.exit_status]\n{lines}"))
