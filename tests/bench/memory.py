"""What the daemon keeps in memory: at rest, after very many jobs, and while it takes one very long answer."""

from tests.bench.clients import crowd
from tests.bench.stand import Bench, forget_peak, peak_mib, resident_mib

ANSWER_MIB = 31
"""Of the 32 that a route takes by default."""
WARM = 2000


def many_jobs(bench: Bench) -> None:
    """Submit very many jobs: some run, some are cancelled, most wait in a paused lane."""
    with bench.lane("memory") as lane:
        before = resident_mib(lane.pid)
        crowd(lane.socket, clients=16, processes=4, total=WARM)
        lane.post("/v1/lane/pause")
        warm = resident_mib(lane.pid)
        rate, _ = crowd(lane.socket, clients=16, processes=4, total=bench.jobs, cancel_each=20)
        after = resident_mib(lane.pid)
    bench.note(jobs=bench.jobs, many_submits_per_s=rate)
    bench.note(fresh_mib=before, warm_mib=warm, after_jobs_mib=after)


def long_answer(bench: Bench) -> None:
    """Let one answer of small pieces come, almost as long as a route takes."""
    with bench.lane("answer") as lane:
        lane.wait(lane.submit("bytes 100000")["id"])
        before = resident_mib(lane.pid)
        forget_peak(lane.pid)
        job = lane.wait(lane.submit(f"bytes {ANSWER_MIB * 1024 * 1024}")["id"], 120)
        if job["status"] != "done":
            raise RuntimeError(f"the long answer is {job['status']}: {job['detail']}")
        bench.note(answer_mib=ANSWER_MIB, answer_growth_mib=peak_mib(lane.pid) - before)
        bench.note(answer_s=_seconds(lane.rows("select started_at, finished_at from jobs order by id desc limit 1")[0]))


def _seconds(row: dict[str, str]) -> float:
    from brainlaned.wire import parse_time

    return (parse_time(row["finished_at"]) - parse_time(row["started_at"])).total_seconds()
