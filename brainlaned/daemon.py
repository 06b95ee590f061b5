"""The only constructor: open, migrate, recover, serve, work, READY; and the reverse on SIGTERM.

Everything else is given what it needs from here. READY is said when every attempt of an earlier run has been decided
and the socket is being served. On SIGTERM nothing new is claimed, submits and lists go on being answered, and the call
in flight may finish within `stop_grace_s`; then, or at a second signal, it is abandoned and its part kept.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import signal
import socket
import sqlite3
import stat
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from . import access, config, errors, events, filesystem, recovery, store, systemd, verify, wire
from .acceptor import Acceptor
from .api import Api
from .backup import Backups
from .brains import Brain
from .brains.command import CommandBrain
from .brains.http import HttpBrain
from .db import Database
from .gate import Gates
from .server import Server
from .spool import Spool, sync_directory
from .streams import Streams
from .upkeep import Upkeep
from .waiters import Waiters
from .watchdog import Watchdog
from .wire import DaemonExit
from .worker import Observer, Worker

STEP_S = 60.0
"""How long one step of a start may take, in seconds, before systemd may think that it hangs."""

UNIT_GRACE_S = 110.0
"""A longer stop_grace_s than this does not fit into the shipped unit's TimeoutStopSec, so it is asked for."""

ABANDON_S = 4.0
"""How long an abandoned call may take to let go, in seconds."""

BACKLOG = 1024
DESCRIPTORS = 8192
_FAILED_WORKER = "a failed worker"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a lane lives."""

    state_dir: Path
    socket_path: Path
    lane: str | None = None
    """The name by which `brainctl --lane` knows it."""


def run(configuration: config.Config, place: Place, cut: Observer = lambda name: None) -> DaemonExit:
    """Run a lane until it is told to stop. Raises StartRefused before READY; nothing has been changed then."""
    notifier = systemd.Notifier()
    _allow_many_descriptors()
    with contextlib.ExitStack() as stack:
        lock_lane(place.state_dir, stack)
        listener = open_listener(place.socket_path, stack)
        database = Database(place.state_dir / "brainlane.db")
        stack.callback(database.close)
        filesystem.check_not_emptied(place.state_dir, has_database=database.is_there())
        try:
            database.open(step=lambda: notifier.extend(STEP_S))
        except (sqlite3.OperationalError, errors.Busy, errors.CommitUnknown) as error:
            raise _cannot_use(database, error) from error
        spool = Spool(place.state_dir / "spool")
        spool.open()
        return asyncio.run(_Lane(configuration, place, database, spool, listener, notifier, cut).live())


def verify_stopped(state_dir: Path) -> DaemonExit:
    """Look at what a stopped lane has kept and print a line for each thing. Return OK when all is well, else DATABASE.

    Raises StartRefused: there is no lane, it is running, or its database is newer than the program.
    """
    with contextlib.ExitStack() as stack:
        if not state_dir.is_dir():
            raise errors.StartRefused(
                DaemonExit.CONFIGURATION, f"cannot verify '{state_dir}': there is no such directory"
            )
        lock_lane(state_dir, stack)
        database = Database(state_dir / "brainlane.db")
        stack.callback(database.close)
        if not database.is_there():
            raise errors.StartRefused(
                DaemonExit.DATABASE, f"cannot verify '{database.path}': no lane's database is there"
            )
        database.refuse_newer()
        found = []
        for is_well, line in verify.look(database, Spool(state_dir / "spool")):
            print(line, flush=True)
            found.append(is_well)
    return DaemonExit.OK if all(found) else DaemonExit.DATABASE


class _GivenUp(Exception):
    """The start was told to stop."""


class _Lane:
    """One run of the daemon."""

    def __init__(
        self,
        configuration: config.Config,
        place: Place,
        database: Database,
        spool: Spool,
        listener: socket.socket,
        notifier: systemd.Notifier,
        cut: Observer,
    ) -> None:
        self._configuration = configuration
        self._place = place
        self._database = database
        self._listener = listener
        self._notifier = notifier
        self._run = uuid.uuid4().hex
        self._client = f"brainctl --lane {place.lane}" if place.lane else "brainctl"
        self._gates = Gates(configuration.routes)
        self._spool = spool
        self._waiters = Waiters()
        self._growth = Waiters()
        self._brains: dict[str, Brain] = {
            name: CommandBrain(route) if route.command else HttpBrain(route)
            for name, route in configuration.routes.items()
        }
        self._reserve = filesystem.Reserve(place.state_dir, configuration.disk_reserve_mib)
        self._worker = Worker(
            database=database,
            spool_directory=spool,
            reserve=self._reserve,
            gates=self._gates,
            routes=configuration.routes,
            brains=self._brains,
            run=self._run,
            moved=self._moved,
            grew=self._growth.moved,
            cut=cut,
        )
        self._cut = cut
        self._acceptor = Acceptor(database, after_commit=self._accepted, deliver=self._on_the_loop)
        self._upkeep = Upkeep(database, configuration)
        database.log_is_long = self._upkeep.cut_log
        self._watchdog = Watchdog(notifier, self._worker, database)
        self._is_given_up = False
        self._signals: asyncio.Queue[str] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def live(self) -> DaemonExit:
        loop = self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, signal.Signals(number).name)
        # Unhandled it would end the process, and look like an orderly stop. There is no reload: restart instead.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            if not await self._recovered():
                return DaemonExit.OK
        except (sqlite3.Error, errors.Busy, errors.CommitUnknown) as error:
            raise _cannot_use(self._database, error) from error
        backups = Backups(self._database, self._reserve)
        await asyncio.to_thread(backups.clear)
        access_list = access.AccessList(self._configuration.access)
        await asyncio.to_thread(access_list.warn_of_unknown_groups)
        self._waiters.start()
        self._growth.start()
        api = Api(
            configuration=self._configuration,
            database=self._database,
            acceptor=self._acceptor,
            cancel_call=self._worker.cancel,
            stuck=lambda: self._worker.stuck,
            running_tokens=lambda: self._worker.tokens,
            erased=self._upkeep.cut_log,
            reserve=self._reserve,
            backups=backups,
            gates=self._gates,
            streams=Streams(self._database, self._spool, self._configuration.routes),
            access_list=access_list,
            waiters=self._waiters,
            growth=self._growth,
            client=self._client,
            about=self._about(),
        )
        server = Server(api.app, self._listener)
        self._acceptor.start()
        await server.begin()
        self._worker.start(failed=self._worker_failed)
        self._upkeep.start()
        self._notifier.ready("Accepting jobs.")
        self._watchdog.start()
        events.ready(str(self._place.socket_path), str(self._place.state_dir), wire.VERSION)

        first = await self._signals.get()
        self._notifier.stopping("Letting the call in flight finish.")
        if self._configuration.stop_grace_s > UNIT_GRACE_S:
            self._notifier.extend(self._configuration.stop_grace_s + 2 * ABANDON_S)
        events.stopping(first)
        api.is_stopping = True
        await self._let_worker_end()
        self._watchdog.stop()
        api.is_over = True
        backups.stop()
        self._waiters.stop()
        self._growth.stop()
        await server.finish()
        await asyncio.to_thread(self._upkeep.stop)
        await asyncio.to_thread(self._acceptor.stop)
        api.close()
        for brain in self._brains.values():
            brain.close()
        ending = "failed" if first == _FAILED_WORKER else f"stopped by {first}"
        await asyncio.to_thread(self._end_run, ending)
        events.stopped(ending)
        return DaemonExit.FAILURE if first == _FAILED_WORKER else DaemonExit.OK

    async def _recovered(self) -> bool:
        """Decide what earlier runs left; False: told to stop meanwhile, and the next start decides the rest."""
        recovering = asyncio.create_task(asyncio.to_thread(self._recover))
        signal_came = asyncio.create_task(self._signals.get())
        await asyncio.wait({recovering, signal_came}, return_when=asyncio.FIRST_COMPLETED)
        if recovering.done():
            if signal_came.done():
                self._signals.put_nowait(signal_came.result())
            signal_came.cancel()
            await recovering
            return True
        self._is_given_up = True
        await asyncio.wait({recovering}, timeout=ABANDON_S)
        events.stopped(f"stopped by {signal_came.result()} before it was ready")
        if not recovering.done():
            events.stop()
            os._exit(DaemonExit.OK)
        with contextlib.suppress(_GivenUp):
            await recovering
            # It had begun its run in the same moment.
            await asyncio.to_thread(self._end_run, f"stopped by {signal_came.result()}")
        return False

    def _on_the_loop(self, answer: Callable[[], None]) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(answer)

    def _accepted(self) -> None:
        self._cut("accepted")
        self._worker.wake()
        self._status_is_old()

    def _moved(self, job_ids: list[int]) -> None:
        self._waiters.moved(job_ids)
        self._status_is_old()

    def _status_is_old(self) -> None:
        if self._notifier.is_heard and self._loop is not None:
            self._loop.call_soon_threadsafe(self._watchdog.moved)

    def _worker_failed(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._signals.put_nowait, _FAILED_WORKER)

    def _recover(self) -> None:
        stops = systemd.read_stops(self._place.state_dir)
        with self._database.write() as tx:
            died = store.settle_runs(tx, stops)
        systemd.forget_stops(self._place.state_dir)
        for run, ending in died:
            events.last_run_died(run, ending)
        recovery.recover(
            self._database,
            self._spool,
            self._gates,
            self._configuration.routes,
            self._configuration.crash_limit,
            self._run,
            step=self._step,
        )
        self._step()
        with self._database.write() as tx:
            invocation = self._notifier.invocation
            store.begin_run(tx, self._run, os.getpid(), self._client, self._configuration.routes, invocation)

    def _step(self) -> None:
        if self._is_given_up:
            raise _GivenUp
        self._notifier.extend(STEP_S)

    async def _let_worker_end(self) -> None:
        self._worker.stop()
        ended = asyncio.create_task(asyncio.to_thread(self._worker.join))
        second = asyncio.create_task(self._signals.get())
        await asyncio.wait(
            {ended, second}, timeout=self._configuration.stop_grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not ended.done():
            why = f"a second signal ({second.result()})" if second.done() else "stop_grace_s is over"
            events.abandoning(why)
            self._worker.abandon()
            await asyncio.wait({ended}, timeout=ABANDON_S)
        second.cancel()
        if not ended.done():
            # What the worker hangs in cannot be ended; the next start judges by the evidence that is on the disk.
            await asyncio.to_thread(self._forgive_death)
            events.stopped("the worker did not let go")
            events.stop()
            os._exit(DaemonExit.FAILURE)

    def _end_run(self, ending: str) -> None:
        with contextlib.suppress(errors.BrainlaneError, sqlite3.Error), self._database.write() as tx:
            store.end_run(tx, self._run, ending)

    def _forgive_death(self) -> None:
        with contextlib.suppress(errors.BrainlaneError, sqlite3.Error), self._database.write(patience_s=0.5) as tx:
            store.forgive_death(tx)

    def _about(self) -> dict[str, object]:
        return {
            "version": wire.VERSION,
            "protocol": wire.PROTOCOL,
            "run": self._run,
            "pid": os.getpid(),
            "started_at": wire.format_time(datetime.now(UTC)),
            "state_dir": str(self._place.state_dir),
            "default_route": self._configuration.default_route,
        }


def _allow_many_descriptors() -> None:
    # The soft limit is low for the sake of programs that use select(), which we do not.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def lock_lane(state_dir: Path, stack: contextlib.ExitStack) -> None:
    """Take the lane's kernel lock, held for life by whoever runs it. Raises StartRefused (69, 77, 78).

    The lock is on the directory itself, so that refusing leaves no file behind, and the kernel gives it back however
    the process ends.
    """
    filesystem.check_local(state_dir)
    try:
        missing = [path for path in (state_dir, *state_dir.parents) if not path.exists()]
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in missing:
            sync_directory(path.parent)
        descriptor = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise errors.StartRefused(
            DaemonExit.PERMISSION if isinstance(error, PermissionError) else DaemonExit.CONFIGURATION,
            f"cannot use state directory '{state_dir}': {error.strerror}",
            f"ls -ld {state_dir}",
        ) from error
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise errors.StartRefused(
            DaemonExit.LANE_TAKEN,
            f"cannot run the lane in '{state_dir}': another brainlaned holds it",
            "brainctl status",
        ) from error
    filesystem.check_writable(state_dir)


def open_listener(path: Path, stack: contextlib.ExitStack) -> socket.socket:
    """Return the control socket: the one that systemd passed, else one bound at `path`. Raises StartRefused.

    A socket of ours is unlinked at the end, and a dead one left behind is replaced; a passed one is never touched.
    """
    passed = systemd.take_descriptors()
    if passed:
        if (listener := systemd.passed_listener()) is not None:
            return stack.enter_context(listener)
        raise errors.StartRefused(
            DaemonExit.CONFIGURATION,
            f"cannot use the passed descriptors ({', '.join(sorted(passed))}): none is a listening stream socket "
            "named 'control'",
            "systemctl cat brainlaned.socket",
        )
    size = len(os.fsencode(path))
    if size > wire.MAX_SOCKET_PATH_BYTES:
        raise errors.StartRefused(
            DaemonExit.CONFIGURATION,
            f"cannot bind socket '{path}': it has {size} bytes, and {wire.MAX_SOCKET_PATH_BYTES} is the limit",
            "brainlaned --socket PATH",
        )
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_strangers_directory(path.parent)
        _clear_dead_socket(path)
        previous = os.umask(0o177)
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(previous)
        listener.listen(BACKLOG)
    except OSError as error:
        raise errors.StartRefused(
            DaemonExit.PERMISSION if isinstance(error, PermissionError) else DaemonExit.CONFIGURATION,
            f"cannot bind socket '{path}': {os.strerror(error.errno or errno.EIO)}",
            f"ls -ld {path.parent}",
        ) from error
    stack.callback(_unlink_own(path))
    return listener


def _refuse_strangers_directory(directory: Path) -> None:
    # Whoever owns the directory can put his own socket in the place of ours, and be sent every prompt.
    owner = directory.stat().st_uid
    if owner not in {0, os.geteuid()}:
        raise errors.StartRefused(
            DaemonExit.PERMISSION,
            f"cannot bind a socket in '{directory}': it belongs to uid {owner}, who could replace it",
            "brainlaned --socket PATH, with a directory of your own",
        )


def _clear_dead_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise errors.StartRefused(
            DaemonExit.CONFIGURATION, f"cannot bind socket '{path}': something else is there", f"ls -l {path}"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except TimeoutError:
            pass  # a full backlog is a sign of life
    raise errors.StartRefused(
        DaemonExit.LANE_TAKEN, f"cannot bind socket '{path}': another process listens there", "brainctl status"
    )


def _unlink_own(path: Path) -> Callable[[], None]:
    ours = path.lstat()

    def unlink() -> None:
        with contextlib.suppress(FileNotFoundError):
            there = path.lstat()
            if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
                path.unlink()

    return unlink


def _cannot_use(database: Database, error: Exception) -> errors.StartRefused:
    cause = error.__cause__ if isinstance(error, errors.BrainlaneError) else error
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    message, directory = f"cannot use database '{database.path}': {error}", database.path.parent
    if code in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}:
        return errors.StartRefused(DaemonExit.PERMISSION, message, f"ls -l {directory}")
    if code in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY}:
        # Over as soon as somebody makes room or lets go, so it is worth another start.
        return errors.StartRefused(DaemonExit.FAILURE, message, f"df {directory}; fuser -v {database.path}")
    return errors.StartRefused(DaemonExit.DATABASE, message, f"sqlite3 {database.path} 'pragma integrity_check'")
