"""The peers, each behind the same four words: `python -m tests.bench.peers NAME (have|put|work|left) ...`.

Each adapter is what its own manual says one would write for "one call at a time, durably", at its own durable setting,
and makes the same HTTP call from its job. It runs as a process of its own, so that no peer's imports disturb anything,
and needs nothing of brainlane. `put` prints how many jobs a second it stored; `work` runs until it is killed; `left`
prints how many jobs the peer still lists as unfinished.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.call import call

IDLE_S = 0.02
"""How long a worker sleeps whose library has no way to wait for work."""


class Adapter(ABC):
    """One peer in one directory."""

    package: str | None = None
    """What must be installed beside the interpreter; None: programs of the system instead."""
    programs: Sequence[str] = ()
    is_python_worker = True

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.url = url

    @abstractmethod
    def put(self, prompts: Sequence[str]) -> None: ...

    @abstractmethod
    def work(self) -> None: ...

    @abstractmethod
    def left(self) -> int: ...


class Huey(Adapter):
    package = "huey"

    def _huey(self) -> tuple[Any, Any]:
        from huey import SqliteHuey

        queue = SqliteHuey("bench", filename=str(self.directory / "huey.db"), fsync=True)
        return queue, queue.task(name="ask")(lambda prompt: call(self.url, prompt))

    def put(self, prompts: Sequence[str]) -> None:
        _, task = self._huey()
        for prompt in prompts:
            task(prompt)

    def work(self) -> None:
        queue, _ = self._huey()
        queue.create_consumer(workers=1, periodic=False).run()

    def left(self) -> int:
        queue, _ = self._huey()
        return int(len(queue) + queue.scheduled_count())


class PersistQueue(Adapter):
    package = "persist-queue"

    def _queue(self, **options: Any) -> Any:
        from persistqueue import SQLiteAckQueue

        return SQLiteAckQueue(str(self.directory / "persist"), auto_commit=True, multithreading=True, **options)

    def put(self, prompts: Sequence[str]) -> None:
        queue = self._queue(auto_resume=False)
        for prompt in prompts:
            queue.put(prompt)

    def work(self) -> None:
        queue = self._queue()
        while True:
            # Its own wait sees only what this very process puts, so another's jobs have to be looked for.
            queue.total = queue._count()
            if not queue.total:
                time.sleep(IDLE_S)  # for work
                continue
            prompt = queue.get()
            call(self.url, prompt)
            queue.ack(prompt)

    def left(self) -> int:
        queue = self._queue(auto_resume=False)
        return int(queue.ready_count() + queue.unack_count())


class LiteQueue(Adapter):
    package = "litequeue"

    def _queue(self) -> Any:
        from litequeue import LiteQueue as Queue

        return Queue(str(self.directory / "lite.db"))

    def put(self, prompts: Sequence[str]) -> None:
        queue = self._queue()
        for prompt in prompts:
            queue.put(prompt)

    def work(self) -> None:
        queue = self._queue()
        while True:
            message = queue.pop()
            if message is None:
                time.sleep(IDLE_S)  # for work
                continue
            call(self.url, message.data)
            queue.done(message.message_id)

    def left(self) -> int:
        queue = self._queue()
        return int(queue.qsize())


class Dbos(Adapter):
    package = "dbos"

    @property
    def _url(self) -> str:
        return f"sqlite:///{self.directory / 'dbos.sqlite'}"

    def work(self) -> None:
        from dbos import DBOS

        DBOS(
            config={
                "name": "bench",
                "system_database_url": self._url,
                "application_version": "1",
                "executor_id": "bench",
                "console_log_level": "ERROR",
            }
        )

        ask = DBOS.step()(call)
        DBOS.workflow(name="job")(lambda prompt: ask(self.url, prompt))
        DBOS.launch()
        # At its default of a second the gap would be a second.
        DBOS.register_queue("lane", concurrency=1, worker_concurrency=1, polling_interval_sec=0.01)
        while True:
            time.sleep(3600)  # its threads work until the process is killed

    def _client(self) -> Any:
        from dbos import DBOSClient

        return DBOSClient(system_database_url=self._url)

    def put(self, prompts: Sequence[str]) -> None:
        if not prompts:
            from dbos import DBOS

            DBOS.migrate(self._url)
        client = self._client()
        for prompt in prompts:
            client.enqueue({"queue_name": "lane", "workflow_name": "job", "app_version": "1"}, prompt)

    def left(self) -> int:
        return len(self._client().list_workflows(status=["PENDING", "ENQUEUED", "DELAYED"]))


class Rq(Adapter):
    package = "rq"
    programs = ("redis-server",)
    simple = False

    def _queue(self) -> Any:
        from redis import Redis
        from rq import Queue

        socket = self.directory / "redis.sock"
        # Started by whoever comes first, and ended by whoever removes the directory: it looks for its own file.
        if not socket.exists():
            durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
            place = ["--port", "0", "--unixsocket", str(socket), "--dir", str(self.directory), "--daemonize", "yes"]
            pidfile = ["--pidfile", str(self.directory / "redis.pid")]
            subprocess.run(["redis-server", *place, *durable, *pidfile], check=True, stdout=subprocess.DEVNULL)
            while not socket.exists():
                time.sleep(IDLE_S)  # for the server
        return Queue("lane", connection=Redis(unix_socket_path=str(socket)))

    def put(self, prompts: Sequence[str]) -> None:
        queue = self._queue()
        for prompt in prompts:
            queue.enqueue("tests.bench.call.call", self.url, prompt, result_ttl=0)

    def work(self) -> None:
        from rq import SimpleWorker, Worker

        queue = self._queue()
        kind = SimpleWorker if self.simple else Worker
        kind([queue], connection=queue.connection).work(logging_level="ERROR")

    def left(self) -> int:
        queue = self._queue()
        return int(len(queue) + queue.started_job_registry.count)


class RqSimple(Rq):
    simple = True


class Command(Adapter):
    """A spooler of commands: each job is a process, which has to start before it can call."""

    is_python_worker = False

    def _command(self, prompt: str) -> list[str]:
        # The directory says whose process it is, so that it can be found and killed.
        program = Path(__file__).with_name("call.py")
        return [sys.executable, "-S", "-E", str(program), str(self.directory), self.url, prompt]

    def work(self) -> None:
        return None  # the first job has started it


class Nq(Command):
    programs = ("nq",)

    def put(self, prompts: Sequence[str]) -> None:
        for prompt in prompts:
            environment = {**os.environ, "NQDIR": str(self.directory)}
            subprocess.run(["nq", "-q", *self._command(prompt)], env=environment, check=True)

    def left(self) -> int:
        # Its job files are executable until their command has begun to run to its end.
        return sum(1 for file in self.directory.glob(",*") if os.access(file, os.X_OK) and file.stat().st_mode & 0o100)


class TaskSpooler(Command):
    programs = ("tsp",)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "TS_SOCKET": str(self.directory / "ts"), "TMPDIR": str(self.directory)}

    def put(self, prompts: Sequence[str]) -> None:
        for prompt in prompts:
            command = ["tsp", "-n", *self._command(prompt)]
            subprocess.run(command, env=self._environment(), check=True, stdout=subprocess.DEVNULL)

    def left(self) -> int:
        shown = subprocess.run(["tsp"], env=self._environment(), check=True, capture_output=True, text=True).stdout
        return sum(1 for line in shown.splitlines()[1:] if line.split()[1] in {"queued", "running"})


ADAPTERS: dict[str, type[Adapter]] = {
    "huey": Huey,
    "persist-queue": PersistQueue,
    "litequeue": LiteQueue,
    "DBOS": Dbos,
    "rq": Rq,
    "rq (simple)": RqSimple,
    "nq": Nq,
    "task-spooler": TaskSpooler,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="One peer at work.")
    parser.add_argument("name", choices=ADAPTERS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("url")
    parser.add_argument("word", choices=("have", "put", "work", "left"))
    parser.add_argument("--prefix", default="")
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args()
    kind = ADAPTERS[options.name]
    if options.word == "have":
        print(importlib.metadata.version(kind.package) if kind.package else "")
        return
    adapter = kind(options.directory, options.url)
    match options.word:
        case "put":
            adapter.put([])  # opens what has to be opened once
            prompts = [f"{options.prefix}{number}" for number in range(options.count)]
            since = time.monotonic()
            adapter.put(prompts)
            print(json.dumps({"per_s": options.count / (time.monotonic() - since), "at": since}))
        case "work":
            adapter.work()
        case _:
            print(adapter.left())


if __name__ == "__main__":
    main()
