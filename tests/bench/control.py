"""The control plane: submits per second, on this disk and on a slow one, and beside a call; and a lane that rests."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench import machine
from tests.bench.clients import ask, crowd, nothing_doing, opened, submit_repeatedly
from tests.bench.results import Latencies
from tests.bench.stand import Bench, BenchLane, cpu_s, resident_mib, wake_ups

CLIENTS = 16
PROCESSES = 4
ONE_CLIENT = 3000
MANY_CLIENTS = 8000
SLOW_CLIENTS = 3200
REST_S = 20.0
WATCHDOG_S = 30
"""As in the shipped unit."""
ROUNDS = 12
SUBMITS_A_ROUND = 200


def submits(bench: Bench) -> None:
    """Measure submits to a lane that is busy with a call, as lanes are, and what the clients could do."""
    with bench.lane("submits") as lane, _in_a_call(lane):
        submit_repeatedly(lane.socket, 200)  # until everything is loaded
        commits = machine.commits_per_s(bench.directory, 0.5)
        one = Latencies(submit_repeatedly(lane.socket, ONE_CLIENT)).quietest_third()
        answer = lane.get("/v1/jobs/1").body
        rate, many = _best_crowd(lane.socket, MANY_CLIENTS)
    bench.note(submit_1_per_s=1000 / one.p50_ms, submit_1_p99_ms=one.p99_ms)
    bench.note(submit_16_per_s=rate, submit_16_p99_ms=many.p99_ms, submit_commits_per_s=commits)
    idle_socket = bench.directory / "nothing"
    server = nothing_doing(idle_socket, answer)
    try:
        alone = Latencies(submit_repeatedly(idle_socket, ONE_CLIENT)).quietest_third()
        rate, _ = _best_crowd(idle_socket, MANY_CLIENTS)
    finally:
        server.kill()
        server.wait()
    bench.note(clients_1_per_s=1000 / alone.p50_ms, clients_16_per_s=rate)


def submits_to_a_slow_disk(bench: Bench) -> None:
    """Measure how many submits share one sync where syncs are slow."""
    slow = machine.slow_disk(bench.directory)
    if slow is None:
        return bench.skip("submits to a slow disk: there is no cc")
    bench.note(slow_syncs_per_s=machine.syncs_per_s(bench.directory, slow))
    with bench.lane("slow", environment=slow) as lane, _in_a_call(lane):
        submit_repeatedly(lane.socket, 50)
        one = Latencies(submit_repeatedly(lane.socket, 300))
        rate, many = crowd(lane.socket, clients=CLIENTS, processes=PROCESSES, total=SLOW_CLIENTS)
    return bench.note(
        slow_submit_1_per_s=1000 / one.p50_ms, slow_submit_16_per_s=rate, slow_submit_16_p99_ms=many.p99_ms
    )


def submits_beside_a_call(bench: Bench) -> None:
    """Measure submits while an answer arrives in small pieces, in turns with submits while nothing is called."""
    beside: list[float] = []
    alone: list[float] = []
    with bench.lane("beside") as lane:
        lane.post("/v1/lane/pause")
        submit_repeatedly(lane.socket, 300)
        for each in _jobs(lane):
            lane.post(f"/v1/jobs/{each}/cancel")
        for _ in range(ROUNDS):
            alone += submit_repeatedly(lane.socket, SUBMITS_A_ROUND)
            call = lane.submit("trickle 60", priority="high", not_before="1990-01-01T00:00:00Z")
            lane.post("/v1/lane/resume")
            lane.wait_for_status(call["id"], "running")
            lane.post("/v1/lane/pause")
            beside += submit_repeatedly(lane.socket, SUBMITS_A_ROUND)
            assert lane.get(f"/v1/jobs/{call['id']}").json["status"] == "running"
            lane.post(f"/v1/jobs/{call['id']}/cancel")
            lane.wait(call["id"])
    bench.note(alone_p50_ms=Latencies(alone).p50_ms, alone_p99_ms=Latencies(alone).p99_ms)
    bench.note(beside_p50_ms=Latencies(beside).p50_ms, beside_p99_ms=Latencies(beside).p99_ms)


def _best_crowd(path: Path, total: int) -> tuple[float, Latencies]:
    """Return the best of three thirds: what else the machine does can only make it worse."""
    return max(
        (crowd(path, clients=CLIENTS, processes=PROCESSES, total=total // 3) for _ in range(3)),
        key=lambda found: found[0],
    )


@contextlib.contextmanager
def _in_a_call(lane: BenchLane) -> Iterator[None]:
    """Let the lane wait for a silent brain for the length of the body."""
    call = lane.submit("hold 600")
    lane.wait_for_status(call["id"], "running")
    yield
    lane.post("/v1/lane/pause")
    lane.post(f"/v1/jobs/{call['id']}/cancel")


def _jobs(lane: BenchLane) -> list[int]:
    return [row["id"] for row in lane.rows("select id from jobs where status = 'queued'")]


def rest(bench: Bench) -> None:
    """Measure a lane that has nothing to do, watched as systemd watches it; then how soon a job reaches its brain."""
    notify = bench.directory / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(os.fspath(notify))
        threading.Thread(target=_drain, args=(listener,), daemon=True).start()
        watched = {"NOTIFY_SOCKET": os.fspath(notify), "WATCHDOG_USEC": str(WATCHDOG_S * 1_000_000)}
        with bench.lane("rest", environment=watched) as lane:
            lane.wait(lane.submit()["id"])
            time.sleep(2)  # for what follows the end of a job
            before, woken, since = cpu_s(lane.pid), wake_ups(lane.pid), time.monotonic()
            time.sleep(REST_S)  # while nothing happens, which is what is measured
            elapsed = time.monotonic() - since
            bench.note(
                rest_cpu_percent=(cpu_s(lane.pid) - before) / elapsed * 100,
                rest_wake_ups_per_s=(wake_ups(lane.pid) - woken) / elapsed,
                rest_sign_of_life_s=WATCHDOG_S / 3,
                rest_mib=resident_mib(lane.pid),
            )
            commits = machine.commits_per_s(bench.directory, 0.5)
            bench.note(start_ms=_start_ms(bench, lane.socket), start_commits_per_s=commits)


def _drain(listener: socket.socket) -> None:
    # Unread messages would fill the queue of the socket, and the daemon would wait for room in it.
    with contextlib.suppress(OSError):
        while listener.recv(4096):
            pass


def _start_ms(bench: Bench, path: Path, samples: int = 120) -> float:
    bench.brain.forget()
    connection = opened(path)
    sent = {}
    for number in range(samples):
        prompt = f"start {number}"
        body = {"request": {"messages": [{"role": "user", "content": prompt}]}}
        sent[prompt] = time.monotonic()
        job = ask(connection, "POST", "/v1/jobs", body)
        number_of_job = job.partition(b'"id":')[2].partition(b",")[0].decode()
        ask(connection, "GET", f"/v1/jobs/{number_of_job}?wait=30")
        time.sleep(0.02)  # for the lane to be idle again
    connection.close()
    arrived = {each.prompt: each.received for each in bench.brain.wait_for(samples, "start ")}
    return Latencies(arrived[prompt] - since for prompt, since in sent.items()).quietest_third().p50_ms
