"""Cut the power of a lane at every sync of a recorded run: `python -m tests.powercut --states N --seed S`.

A real daemon runs under strace, which writes down what it does to its files and what it says on its sockets. Replaying
that log gives, for every instant, what a disk must hold (all that had been synced) and what it may hold besides. From
that the state directory is built as it may be found after the cut, and a lane is recovered in it; it must have kept all
that anybody had been told, and must send nothing again that may have been sent.

What may be found, where nothing was synced since:
    a file's content   each page as it was at any moment since the sync, now and then torn between sectors; the size
                       may be there before the bytes are (zeros)
    a directory        what was done to its entries, in order, up to any point; a file of its own that is synced is
                       lost all the same when the entry is not
That is POSIX at its strictest, but for one thing: the state directory itself counts as made beforehand. SQLite needs no
exception, since it syncs the directory when it has made a journal. Its -shm is left out: recovery makes it anew.
"""

import argparse
import json
import logging
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brainlaned import config, recovery
from brainlaned.brains import reply
from brainlaned.db import Database
from brainlaned.gate import Gates
from brainlaned.spool import Spool
from tests.brainserver import BrainServer, Exchange, Step, answer, chunk, delta, head, json_answer
from tests.lane import Lane, config_for

PAGE, SECTOR = 4096, 512
FINAL = {"done", "failed", "cancelled"}
SETTLE_S = 60.0

# strace


TRACED = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,truncate,ftruncate,fallocate,copy_file_range,sendfile,"
    "rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,mkdir,mkdirat,rmdir,fsync,fdatasync,"
    "sync_file_range,sync,syncfs,sendto,sendmsg"
)
_STRACE = ["strace", "-D", "-f", "--seccomp-bpf", "-yy", "-xx", "-s", "8000000", "-e", "signal=kill"]
"""-D keeps the daemon our own child; all strings whole and in hexadecimal, so that none holds a comma or a quote. The
only signal of interest is the one that ends it."""


def reason_not_to_trace() -> str | None:
    """Return why no process can be traced here, or None when one can."""
    try:
        tried = subprocess.run([*_STRACE, "-e", "trace=fsync", "true"], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return "strace is not installed"
    traced = tried.returncode == 0 and "+++ exited with 0 +++" in tried.stderr
    return None if traced else f"strace cannot trace here: {tried.stderr.strip()[-200:]}"


class TracedLane(Lane):
    """A lane whose daemon runs under strace, each start with a log of its own; `options` are more for strace."""

    def __init__(self, directory: Path, config: str) -> None:
        super().__init__(directory, config)
        self.traces: list[Path] = []
        self.options = ["-e", f"trace={TRACED}"]

    def command(self, *, cut: str | None = None, times: int = 1) -> list[str]:
        self.traces.append(self.directory / f"trace-{len(self.traces) + 1}")
        command = super().command(cut=cut, times=times)
        return [*_STRACE, *self.options, "-o", str(self.traces[-1]), "--", *command]

    def stop(self, limit_s: float = 20.0) -> int:
        status = super().stop(limit_s)
        self.wait_for_the_log()
        return status

    def wait_for_the_log(self) -> None:
        """Wait until strace, which outlives the daemon by a moment, has written its last line."""
        assert self.process is not None
        ended = re.compile(rb"^%d +\+\+\+ " % self.process.pid, re.MULTILINE)
        deadline = time.monotonic() + SETTLE_S
        while not ended.search(self.traces[-1].read_bytes()[-2000:]):
            assert time.monotonic() < deadline, f"no end in {self.traces[-1]}"
            time.sleep(0.01)  # for strace to write the end of the daemon down


@dataclass(frozen=True, slots=True)
class Call:
    """One system call that succeeded. `began` and `ended` are places in the log, which has cause before effect."""

    began: int
    ended: int
    name: str
    descriptor: int | None
    where: str
    """The path of the descriptor, or what strace says of a socket."""
    arguments: list[str]
    result: int

    def text(self, number: int) -> bytes:
        return _unescaped(self.arguments[number].strip('"'))

    def path(self, number: int = 0) -> str:
        return self.text(number).decode()


_LINE = re.compile(r"(\d+) +(<\.\.\. \w+ resumed>)?(.*)\n", re.DOTALL)
_CALL = re.compile(r"(\w+)\((?:(\d+|AT_FDCWD)<((?:->|[^>])*)>)?(?:, )?(.*)\) += (\d+)", re.DOTALL)


def read_traces(paths: Iterable[Path]) -> list[Call]:
    """Return the calls of one log, or of several one after the other, in the order in which they ended."""
    calls: list[Call] = []
    position = 0
    for path in paths:
        unfinished: dict[str, tuple[int, str]] = {}
        with path.open(encoding="ascii") as lines:
            for line in lines:
                position += 1
                matched = _LINE.fullmatch(line)
                assert matched, line[:200]
                process, resumed, said = matched.groups()
                began = position
                if resumed:
                    began, start = unfinished.pop(process)
                    said = start + said
                if said.endswith(" <unfinished ...>"):
                    unfinished[process] = (began, said.removesuffix(" <unfinished ...>"))
                elif called := _CALL.match(said):
                    name, descriptor, where, arguments, result = called.groups()
                    number = int(descriptor) if descriptor and descriptor.isdecimal() else None
                    where = _unescaped(where).decode() if where and where.startswith("\\x") else where or ""
                    calls.append(Call(began, position, name, number, where, arguments.split(", "), int(result)))
    return calls


def _unescaped(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


@dataclass(frozen=True, slots=True)
class Said:
    """A message on a socket: where in the log its first byte may have left, its first line and headers, its body."""

    at: int
    head: str
    body: bytes


def messages(calls: Iterable[Call], socket: str, begins: bytes) -> list[Said]:
    """Put together the HTTP messages that were sent over sockets of a kind ("TCP", "UNIX")."""
    found: list[Said] = []
    open_ones: dict[str, tuple[int, bytes]] = {}
    for call in calls:
        if call.name not in {"sendto", "write"} or not call.where.startswith(socket):
            continue
        data = call.text(0)[: call.result]
        at, before = open_ones.pop(call.where, (call.began, b""))
        if not before and not data.startswith(begins):
            continue
        top, is_whole, body = (before + data).partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", top, re.IGNORECASE)
        if is_whole and len(body) >= int(length[1] if length else 0):
            found.append(Said(at, top.decode("latin-1"), body))
        else:
            open_ones[call.where] = (at, before + data)
    # A message that was never finished has begun all the same.
    found += [Said(at, data.partition(b"\r\n\r\n")[0].decode("latin-1"), b"") for at, data in open_ones.values()]
    return found


# The disk


@dataclass
class File:
    """What is surely on the disk of a file, and what was done to it since: (place in the log, offset, bytes)."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, int, bytes | None]] = field(default_factory=list)
    """No bytes: the file was cut or stretched to that size."""

    def sync(self, began: int) -> None:
        for at, offset, data in self.pending:
            if at < began:
                _apply(self.durable, offset, data)
        self.pending = [change for change in self.pending if change[0] >= began]

    def live(self) -> bytearray:
        content = bytearray(self.durable)
        for _, offset, data in self.pending:
            _apply(content, offset, data)
        return content

    def found(self, chance: random.Random) -> bytes:
        """Return what a power cut may leave of it."""
        mode = chance.choice(("lost", "kept", "in order", *("pages",) * 3))
        changes = len(self.pending)
        if mode == "lost" or not changes:
            return bytes(self.durable)
        if mode == "kept":
            return bytes(self.live())
        if mode == "in order":
            return self._in_order(chance)
        live = self.live()
        touched = {
            page
            for _, offset, data in self.pending
            if data
            for page in range(offset // PAGE, (offset + len(data) - 1) // PAGE + 1)
        }
        # Which of its moments is found of every sector: those of a page share theirs, unless the page is torn.
        moments: dict[int, list[int]] = {}
        for page in sorted(touched):
            moment = chance.choice((0, changes, chance.randint(0, changes)))
            torn = chance.random() < 1 / 8
            for sector in range(page * PAGE // SECTOR, (page + 1) * PAGE // SECTOR):
                moments.setdefault(chance.randint(0, changes) if torn else moment, []).append(sector)
        found = bytearray(self.durable)
        content = bytearray(self.durable)
        for moment in range(changes + 1):
            if moment:
                _apply(content, *self.pending[moment - 1][1:])
            for sector in moments.get(moment, ()):
                piece = content[sector * SECTOR : (sector + 1) * SECTOR]
                if piece:
                    _apply(found, sector * SECTOR, bytes(piece))
        if chance.random() < 1 / 2:
            _apply(found, len(live), None)  # the size alone
        return bytes(found)

    def _in_order(self, chance: random.Random) -> bytes:
        number = chance.randrange(len(self.pending))
        content = bytearray(self.durable)
        for _, offset, data in self.pending[:number]:
            _apply(content, offset, data)
        _, offset, data = self.pending[number]
        if data is not None:
            _apply(content, offset, data[: chance.randint(0, len(data))])
        return bytes(content)


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    content.extend(bytes(max(0, offset - len(content))))
    if data is None:
        del content[offset:]
    else:
        content[offset : offset + len(data)] = data


@dataclass
class Directory:
    """Entries surely on the disk, those that a running process sees, and the changes that lie between the two."""

    durable: "dict[str, File | Directory]" = field(default_factory=dict)
    live: "dict[str, File | Directory]" = field(default_factory=dict)
    pending: "list[tuple[int, dict[str, File | Directory | None]]]" = field(default_factory=list)

    def change(self, at: int, entries: "dict[str, File | Directory | None]") -> None:
        self.pending.append((at, entries))
        _enter(self.live, entries)

    def sync(self, began: int) -> None:
        for at, entries in self.pending:
            if at < began:
                _enter(self.durable, entries)
        self.pending = [change for change in self.pending if change[0] >= began]

    def build(self, place: Path, chance: random.Random) -> None:
        """Make it at `place` as a power cut may leave it."""
        place.mkdir(mode=0o700)
        entries = dict(self.durable)
        changes = len(self.pending)
        for _, change in self.pending[: chance.choice((0, changes, chance.randint(0, changes)))]:
            _enter(entries, change)
        for name, node in sorted(entries.items()):
            if isinstance(node, Directory):
                node.build(place / name, chance)
            elif not name.endswith("-shm"):
                (place / name).write_bytes(node.found(chance))


def _enter(entries: dict[str, File | Directory], change: dict[str, File | Directory | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """A state directory, as the calls of a process change it."""

    def __init__(self, state_dir: Path) -> None:
        self._root = f"{state_dir}/"
        self.top = Directory()
        self._offsets: dict[int, int] = {}

    def concerns(self, call: Call) -> bool:
        return f"{call.where}/".startswith(self._root) or any(
            f"{call.path(number)}/".startswith(self._root)
            for number, argument in enumerate(call.arguments[:2])
            if argument.startswith('"\\x2f')
        )

    def node(self, path: str) -> File | Directory | None:
        node: File | Directory | None = self.top
        for part in Path(path).relative_to(self._root).parts:
            node = node.live.get(part) if isinstance(node, Directory) else None
        return node

    def apply(self, call: Call) -> None:
        """Do what a call did. Raises ValueError for one that this model does not know."""
        match call.name:
            case "open" | "openat":
                self._open(call)
            case "mkdir":
                if call.path() + "/" != self._root:
                    self._enter(call.ended, call.path(), Directory())
            case "unlink":
                self._enter(call.ended, call.path(), None)
            case "rename":
                node = self.node(call.path())
                parent, old = self._place(call.path())
                same_parent, new = self._place(call.path(1))
                if parent is not same_parent:
                    raise ValueError(f"cannot replay a move to another directory: {call.path(1)}")
                parent.change(call.ended, {old: None, new: node})
            case "write" | "pwrite64":
                assert call.descriptor is not None
                data = call.text(0)[: call.result]
                offset = self._offsets[call.descriptor] if call.name == "write" else int(call.arguments[2])
                if call.name == "write":
                    self._offsets[call.descriptor] += len(data)
                self._file(call.where).pending.append((call.ended, offset, data))
            case "ftruncate":
                self._file(call.where).pending.append((call.ended, int(call.arguments[0], 0), None))
            case "fsync" | "fdatasync":
                node = self.node(call.where)
                assert node is not None, call.where
                node.sync(call.began)
            case _:
                raise ValueError(f"cannot replay {call.name} on {call.where or call.arguments}")

    def _open(self, call: Call) -> None:
        flags = call.arguments[1].split("|")
        if "O_CREAT" in flags and self.node(call.path()) is None:
            self._enter(call.ended, call.path(), File())
        if "O_TRUNC" in flags or "O_APPEND" in flags:
            raise ValueError(f"cannot replay {call.arguments}")
        self._offsets[call.result] = 0

    def _enter(self, at: int, path: str, node: File | Directory | None) -> None:
        parent, name = self._place(path)
        parent.change(at, {name: node})

    def _place(self, path: str) -> tuple[Directory, str]:
        parent = self.node(str(Path(path).parent))
        assert isinstance(parent, Directory), path
        return parent, Path(path).name

    def _file(self, path: str) -> File:
        node = self.node(path)
        assert isinstance(node, File), path
        return node


# A run to be recorded

LATE, SLOW, TWICE, WHOLE, BIG = "late", "slow", "twice", "whole", "big"


def tokens_of(name: str) -> list[str]:
    """What the brain says to the job of this name; a long answer fills several pages of its spool."""
    return [f"{name} {number} " for number in range(60 if name.startswith("long") else 5)]


def text_of(name: str) -> str:
    return "".join(tokens_of(name))


def _begin_and_wait(x: Exchange) -> None:
    x.read_body()
    x.send(head(chunked=True) + chunk(delta(tokens_of(LATE)[0])))
    x.pause()


def _brain(prompt: str | None) -> Step | None:
    name = str(prompt).split(" ")[0]
    if name == LATE:
        return _begin_and_wait
    if name == WHOLE:
        return json_answer(text_of(name))
    # A slow one lasts for longer than the second after which a spool is synced.
    return answer(tokens=tokens_of(name), gap_s=0.25 if name == SLOW else 0)


def record(directory: Path) -> TracedLane:
    """Run a lane twice under strace: jobs are submitted, cancelled, streamed, done, the log copied back and removed."""
    with BrainServer() as server:
        server.by_prompt(_brain)
        lane = TracedLane(directory, config_for(server.base_url))
        try:
            lane.start()
            _settle(lane, [_submit(lane, "first")])
            late = _submit(lane, LATE)
            names = ["early", "small", TWICE, "long-1", WHOLE, "long-2"]
            with ThreadPoolExecutor(4) as clients:
                jobs = dict(zip(names, clients.map(lambda name: _submit(lane, name), names), strict=True))
            assert lane.post(f"/v1/jobs/{jobs.pop('early')}/cancel").status == 200
            while lane.get(f"/v1/jobs/{late}/output?partial=1").status != 200:
                time.sleep(0.02)  # for its first word
            assert lane.post(f"/v1/jobs/{late}/cancel").status == 200
            _settle(lane, [late, *jobs.values()])
            _settle(lane, [_submit(lane, SLOW), _submit(lane, BIG), _submit(lane, "after")])
            assert lane.stop() == 0
            lane.start()
            _settle(lane, [_submit(lane, "long-3"), _submit(lane, "last")])
            assert lane.stop() == 0
        finally:
            if lane.process is not None and lane.process.poll() is None:
                lane.kill()
    assert server.max_concurrent == 1
    return lane


def _submit(lane: Lane, name: str) -> int:
    # What the big one adds to SQLite's log makes it be copied back into the database while the lane runs.
    prompt = f"{name} {'x' * (2_000_000 if name == BIG else 10)}"
    number: int = lane.submit(prompt, key=name, may_run_twice=name == TWICE)["id"]
    return number


def _settle(lane: Lane, jobs: Iterable[int]) -> None:
    for number in jobs:
        lane.wait(number, SETTLE_S)


# Replaying it


class Replay:
    """What the disk holds, and what has been promised to whom, at one place of a log after the other."""

    def __init__(self, calls: list[Call], state_dir: Path, routes: Path) -> None:
        self.disk = Disk(state_dir)
        self.routes = config.load(routes).routes
        self.at = 0
        self.names: dict[int, str] = {}
        """Every job that somebody was told is accepted."""
        self.told: dict[int, str] = {}
        """The final status that somebody was told."""
        self.cancelled: set[int] = set()
        """Every job of which somebody was told that its cancel is recorded."""
        self.sent: dict[int, str] = {}
        """Every job of which a first byte may have left for the brain."""
        self.spools: dict[int, File] = {}
        self._calls = calls

    def cuts(self) -> Iterator[str]:
        """Go on to the next place at which the power may go, and say what it is.

        Before and after each sync, after each promise and each request, and at the end.
        """
        happened: list[tuple[int, Call | Said]] = [(each.at, each) for each in messages(self._calls, "UNIX", b"HTTP/")]
        happened += [(each.at, each) for each in messages(self._calls, "TCP", b"POST ")]
        happened += [(call.ended, call) for call in self._calls if self.disk.concerns(call)]
        for self.at, what in sorted(happened, key=lambda each: each[0]):
            if isinstance(what, Said):
                if why := self._hear(what):
                    yield why
                continue
            sync = f"{what.name} of {Path(what.where).name}" if what.name in {"fsync", "fdatasync"} else None
            if sync:
                yield f"before the {sync}"
            self.disk.apply(what)
            if what.name == "openat" and what.path().endswith(".part"):
                node = self.disk.node(what.path())
                assert isinstance(node, File)
                self.spools[int(Path(what.path()).stem.split("-")[0])] = node
            if sync:
                yield f"after the {sync}"
        yield "at the end"

    def _hear(self, said: Said) -> str | None:
        if said.head.startswith("POST"):
            found = re.search(r"x-request-id: (\d+)-", said.head, re.IGNORECASE)
            assert found
            number = int(found[1])
            # Of a request that never left whole, only its job is known.
            name = _prompt(said.body).split(" ")[0] or self.names.get(number, "")
            self.sent[number] = name
            return f"after the request for '{name}' began to leave"
        status = said.head.split(" ")[1]
        job = json.loads(said.body) if status in {"200", "201"} and said.body.startswith(b'{"id"') else None
        if job is None:
            return None
        self.names[job["id"]] = job["key"]
        if job["status"] in FINAL:
            self.told[job["id"]] = job["status"]
        if job["cancel_requested_at"]:
            self.cancelled.add(job["id"])
        return f"after {status} was said of '{job['key']}' ({job['status']})"

    # What must be true of a state directory that was found after a cut here.

    def faults(self, state_dir: Path) -> list[str]:
        """Recover a lane in a directory, sending nothing, and return every promise that was not kept."""
        try:
            with closing(Database(state_dir / "brainlane.db")) as database:
                database.open()
                with database.read() as connection:
                    problems = [str(row[0]) for row in connection.execute("pragma integrity_check")]
                    problems += [str(tuple(row)) for row in connection.execute("pragma foreign_key_check")]
                spool = Spool(state_dir / "spool")
                spool.open()
                recovery.recover(database, spool, Gates(self.routes), self.routes, 2, "after-the-cut")
                with database.read() as connection:
                    rows = connection.execute(
                        """
                        select jobs.*, request, job_outputs.text as output, attempt_parts.text as part from jobs
                        left join job_requests on job_requests.job_id = jobs.id
                        left join job_outputs on job_outputs.job_id = jobs.id
                        left join attempt_parts
                            on attempt_parts.job_id = jobs.id and attempt_parts.attempt = jobs.attempt_count
                        """
                    )
                    jobs = {row["id"]: dict(row) for row in rows}
        except Exception as error:  # whatever it is, no lane would start there
            return [f"it cannot be recovered: {error!r}"]
        faults = [problem for problem in problems if problem != "ok"]
        faults += [f"'{name}' was accepted and is gone" for number, name in self.names.items() if number not in jobs]
        for job in jobs.values():
            faults += [f"'{job['key']}', {job['status']} ({job['reason']}), {fault}" for fault in self._judge(job)]
        return faults

    def _judge(self, job: dict[str, Any]) -> Iterator[str]:
        number, name, status = job["id"], job["key"], job["status"]
        if self.names.get(number, name) != name or not _prompt(job["request"]).startswith(f"{name} "):
            yield "has become another"
        if self.told.get(number, status) != status:
            yield f"was said to be {self.told[number]}"
        if number in self.cancelled and status != "cancelled":
            yield "was said to be cancelled"
        if status == "running":
            yield "is left running"
        if status == "queued" and number in self.sent and name != TWICE:
            yield "would be sent again"
        said = text_of(name)
        if status == "done" and job["output"] != said:
            yield f"has another output: {job['output']!r}"
        if not said.startswith(job["part"] or ""):
            yield f"has a part that was never said: {job['part']!r}"
        if "its spool is gone" in job["detail"]:
            yield "was marked as answered before its spool held that"
        synced = None if status in FINAL or name == TWICE else self._synced(number)
        if synced is not None and synced.complete:
            yield "had its answer on the disk"
        if synced is not None and not (job["part"] or "").startswith(synced.text):
            yield f"has lost what was on the disk: {synced.text!r}"

    def _synced(self, number: int) -> reply.Reply | None:
        file = self.spools.get(number)
        if file is None or b"\n" not in file.durable:
            return None
        return reply.read([bytes(file.durable).partition(b"\n")[2]])


def _prompt(request: str | bytes | None) -> str:
    return str(json.loads(request)["messages"][-1]["content"]) if request else ""


@dataclass
class Report:
    """What came of some of the states. `faults` is empty when every promise was kept."""

    seed: int
    directory: Path
    states: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"seed {self.seed}, recorded in {self.directory}: {self.states} states, {len(self.faults)} faults"
        return "\n".join([head, *(f"FAULT {fault}" for fault in self.faults)])


def replay(
    lane: TracedLane,
    states: int | None,
    seed: int,
    *,
    calls: list[Call] | None = None,
    check: Callable[[Replay, Path], list[str]] = Replay.faults,
    most_faults: int = 20,
) -> Report:
    """Build `states` of what the cuts of a run may leave (None: one for each cut), spread over it, and check each.

    A state depends on the seed and its number alone, so that one can be built again from the same log.
    """
    calls = read_traces(lane.traces) if calls is None else calls
    count = sum(1 for _ in Replay(calls, lane.state_dir, lane.config).cuts())
    chance = random.Random(seed)
    whole_rounds, rest = divmod(count if states is None else states, count)
    turns = Counter(dict.fromkeys(range(count), whole_rounds)) + Counter(chance.sample(range(count), rest))
    report = Report(seed, lane.directory)
    moving = Replay(calls, lane.state_dir, lane.config)
    for number, why in enumerate(moving.cuts()):
        for turn in range(turns[number]):
            with tempfile.TemporaryDirectory(dir=lane.directory, prefix="cut-") as place:
                found = Path(place) / "state"
                moving.disk.top.build(found, random.Random(f"{seed}-{number}-{turn}"))
                faults = check(moving, found)
            report.states += 1
            report.faults += [f"cut {number}.{turn} at {moving.at}, {why}: {fault}" for fault in faults]
        if len(report.faults) >= most_faults:
            break
    return report


def faults_of_a_start(moving: Replay, found: Path) -> list[str]:
    """Start a real lane in a directory that was found, let it drain, and say what it asked again or lost."""
    faults: list[str] = []
    with BrainServer() as server:
        server.by_prompt(lambda prompt: answer(tokens=tokens_of(str(prompt).split(" ")[0])))
        lane = Lane(found.parent / "lane", config_for(server.base_url))
        lane.state_dir = found
        try:
            lane.start()
            jobs = lane.get("/v1/jobs?limit=500").json["jobs"]
            ended = {job["id"]: lane.wait(job["id"], SETTLE_S) for job in jobs}
            asked = Counter(str(each.prompt).split(" ")[0] for each in server.requests if each.method == "POST")
            outputs = {
                number: lane.get(f"/v1/jobs/{number}/output").body.decode()
                for number, job in ended.items()
                if job["status"] == "done"
            }
            status = lane.stop()
        finally:
            if lane.process is not None and lane.process.poll() is None:
                lane.kill()
        faults += [f"the lane exits with {status}"] if status else []
        faults += [f"'{name}' is gone" for number, name in moving.names.items() if number not in ended]
        faults += [f"'{name}' was sent again" for name in moving.sent.values() if asked[name] and name != TWICE]
        faults += [f"'{name}' was sent {times} times" for name, times in asked.items() if times > 1]
        for number, text in outputs.items():
            if text != text_of(ended[number]["key"]):
                faults.append(f"'{ended[number]['key']}' has another output: {text!r}")
        for number, told in moving.told.items():
            if number in ended and ended[number]["status"] != told:
                faults.append(f"'{moving.names[number]}' was said to be {told} and is {ended[number]['status']}")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description="Cut the power of a recorded lane, again and again.")
    parser.add_argument("--states", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=12, help="in how many of them a real lane is started")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--run", type=Path, default=None, help="record here and keep it; replay it if it is there")
    options = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())
    if reason := reason_not_to_trace():
        raise SystemExit(reason)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    directory = options.run or Path(tempfile.mkdtemp(prefix="powercut-"))
    traces = sorted(directory.glob("trace-*"))
    if traces:
        lane = TracedLane(directory, (directory / "brainlaned.toml").read_text())
        lane.traces = traces
    else:
        lane = record(directory)
    reports = [replay(lane, options.states, seed)]
    reports.append(replay(lane, options.starts, seed, check=faults_of_a_start))
    print(*reports, sep="\n")
    faulty = any(report.faults for report in reports)
    if options.run is None and not faulty:
        shutil.rmtree(directory)  # else it is kept, to be replayed with --run
    raise SystemExit(1 if faulty else 0)


if __name__ == "__main__":
    main()
