"""The arrows between the rooms, and the habits that no other tool checks, read from the source with ast.

Every walker is first shown a planted fault, so that a walker that has gone blind fails as well.
"""

import ast
import functools
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brainlaned import states, wire
from brainlaned.db import Database

ROOT = Path(__file__).resolve().parent.parent
DAEMON = ROOT / "brainlaned"
CLIENT = ROOT / "brainctl"
MOST_LINES = 700

Found = list[str]
"""What a walker objects to: one "LINE: what" for each."""


def sources(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=path.name)


def objections(package: Path, walk: Callable[[ast.Module], Found], *, but: tuple[str, ...] = ()) -> dict[str, Found]:
    """Walk every module of a package but those named, and return what was found, by module."""
    walked = {path.relative_to(package).as_posix(): walk(tree_of(path)) for path in sources(package)}
    return {name: found for name, found in walked.items() if found and name not in but}


# The arrows.


def drawn_lines() -> list[list[str]]:
    """The lines of the diagram, the highest first."""
    words = ast.get_docstring(tree_of(DAEMON / "__init__.py"), clean=True) or ""
    _, _, diagram = words.partition("Arrows point down only")
    return [line.split() for line in diagram.splitlines() if line.startswith("    ")]


def rooms() -> set[str]:
    modules = {path.stem for path in DAEMON.glob("*.py")} - {"__init__"}
    return modules | {path.parent.name for path in DAEMON.glob("*/__init__.py")}


def imported_rooms(tree: ast.Module, depth: int) -> set[str]:
    """The rooms of brainlaned that a module imports, wherever in it. `depth`: how many packages it stands in."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name.split(".") for alias in node.names]
            found |= {path[1] for path in paths if path[0] == "brainlaned" and len(path) > 1}
        elif isinstance(node, ast.ImportFrom):
            path = node.module.split(".") if node.module else []
            if node.level == 0 and path[0] == "brainlaned":
                path = path[1:]
            elif node.level != depth:
                continue  # another package, or a neighbour in the same room
            found |= {path[0]} if path else {alias.name for alias in node.names}
    return found


def arrows() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {room: set() for room in rooms()}
    for path in sources(DAEMON):
        parts = path.relative_to(DAEMON).with_suffix("").parts
        if parts != ("__init__",):
            found[parts[0]] |= imported_rooms(tree_of(path), len(parts))
    return {room: (others & rooms()) - {room} for room, others in found.items()}


def test_every_room_stands_in_the_diagram_once() -> None:
    drawn = [room for line in drawn_lines() for room in line]
    assert len(drawn) == len(set(drawn))
    assert rooms() - set(drawn) == set()


@pytest.mark.parametrize("room", sorted(rooms()))
def test_arrows_point_down_and_never_along_a_line(room: str) -> None:
    line = {drawn: number for number, drawn_line in enumerate(drawn_lines()) for drawn in drawn_line}
    if room not in line:
        pytest.skip("not in the diagram, which another test says")
    assert {other for other in arrows()[room] if other in line and line[other] <= line[room]} == set()


@pytest.mark.parametrize(
    ("source", "depth", "found"),
    [
        ("from . import store, wire", 1, {"store", "wire"}),
        ("from .brains.http import HttpBrain", 1, {"brains"}),
        ("from ..wire import Reason", 2, {"wire"}),
        ("from .. import config", 2, {"config"}),
        ("from .reply import Reply", 2, set()),
        ("import brainlaned.db", 1, {"db"}),
        ("from brainlaned import api", 1, {"api"}),
        ("from brainlaned.store import accept", 2, {"store"}),
        ("def late():\n    from .gate import Gates", 1, {"gate"}),
        ("import json\nfrom collections.abc import Mapping", 1, set()),
    ],
)
def test_the_reader_of_imports_sees_every_form(source: str, depth: int, found: set[str]) -> None:
    assert imported_rooms(ast.parse(source), depth) == found


def test_the_daemon_knows_nothing_of_its_client() -> None:
    def walk(tree: ast.Module) -> Found:
        return [name for name in imported_modules(tree) if name.split(".")[0] == "brainctl"]

    assert objections(DAEMON, walk) == {}


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Full names of what a module imports from other packages; of `from a import b` both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_client_imports_the_contract_and_nothing_else_of_the_daemon() -> None:
    allowed = re.compile(r"brainlaned\.wire(\..*)?|brainlaned")

    def walk(tree: ast.Module) -> Found:
        names = list(imported_modules(tree))
        bare = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        whole = ["import brainlaned" for node in bare for alias in node.names if alias.name == "brainlaned"]
        return whole + [name for name in names if name.startswith("brainlaned") and not allowed.fullmatch(name)]

    assert walk(ast.parse("from brainlaned import db, wire")) == ["brainlaned.db"]
    assert walk(ast.parse("from brainlaned.store import accept")) == ["brainlaned.store", "brainlaned.store.accept"]
    assert walk(ast.parse("import brainlaned")) == ["import brainlaned"]
    assert objections(CLIENT, walk) == {}


@pytest.mark.parametrize("arguments", [["-c", "import brainctl.cli"], ["-m", "brainctl", "--version"]])
def test_the_client_starts_without_sqlite_and_without_the_daemon(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    loaded = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert {"brainctl.cli", "brainlaned.wire"} <= loaded
    assert {name for name in loaded if name.startswith("brainlaned")} == {"brainlaned", "brainlaned.wire"}
    assert not {
        name for name in loaded if name.split(".")[0] in {"sqlite3", "_sqlite3", "starlette", "uvicorn", "httpx"}
    }


# Nothing waits while the database is locked.

WAITS = frozenset({"run", "begin", "call", "sleep", "wait", "wait_for", "join", "result", "ask", "acquire", "select"})


def is_text_join(call: ast.Call) -> bool:
    return (
        isinstance(call.func, ast.Attribute) and call.func.attr == "join" and isinstance(call.func.value, ast.Constant)
    )


def locked_parts(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs while the write lock is held: the body of `with ...write(...)`, and whatever is handed a `tx`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            if any(isinstance(call.func, ast.Attribute) and call.func.attr == "write" for call in calls):
                yield from node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if any(argument.arg == "tx" for argument in given):
                yield from node.body if isinstance(node.body, list) else [node.body]


def waits_under_the_lock(tree: ast.Module) -> Found:
    found = set()
    for part in locked_parts(tree):
        for node in ast.walk(part):
            if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
                found.add(f"{node.lineno}: awaits")
            elif isinstance(node, ast.Call) and not is_text_join(node):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in WAITS:
                    found.add(f"{node.lineno}: {name}")
    return sorted(found)


def test_nothing_waits_or_asks_a_brain_while_the_database_is_locked() -> None:
    assert objections(DAEMON, waits_under_the_lock) == {}


def test_the_walker_looks_into_the_transactions_that_there_are() -> None:
    seen = {path.name: len(list(locked_parts(tree_of(path)))) for path in sources(DAEMON)}
    for name in ("worker.py", "recovery.py", "acceptor.py", "api.py", "daemon.py", "store.py", "gate.py", "db.py"):
        assert seen[name] > 0, name


@pytest.mark.parametrize(
    "planted",
    [
        "with self._database.write(first=True) as tx:\n    ended = call.run(marks)",
        "with self._database.write(first=True) as tx:\n    if claim:\n        brain.begin(request)",
        "with db.write():\n    brains[route].call(job)",
        "with a() as b, db.write() as tx:\n    time.sleep(1)",
        "with db.write() as tx:\n    sleep(1)",
        "with db.write() as tx:\n    changed.wait_for(lambda: done, 5)",
        "with db.write() as tx:\n    thread.join()",
        "async def f():\n    with db.write() as tx:\n        await other()",
        "async def f():\n    with db.write() as tx:\n        async with other():\n            pass",
        "def claim_next(tx, routes):\n    return future.result()",
        "acceptor.ask(lambda tx: time.sleep(1))",
    ],
)
def test_the_walker_finds_a_planted_wait(planted: str) -> None:
    assert len(waits_under_the_lock(ast.parse(planted))) == 1


@pytest.mark.parametrize(
    "fine",
    [
        "with db.write() as tx:\n    store.finish(tx, 1)\nended = call.run(marks)",
        "with db.write() as tx:\n    text = ', '.join(names)",
        "with file.open() as f:\n    call.run(marks)",
    ],
)
def test_the_walker_leaves_alone_what_is_outside(fine: str) -> None:
    assert waits_under_the_lock(ast.parse(fine)) == []


# One place for each of these.

OPENS_OR_ENDS = re.compile(r"(begin|commit|rollback)( (immediate|exclusive|deferred|transaction))?\s*;?", re.I)


def transaction_statements(tree: ast.Module) -> Found:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if OPENS_OR_ENDS.fullmatch(node.value.strip()):
                found.append(node.value.strip().lower())
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name in {"commit", "executescript"}:
                found.append(f"{name}()")
            elif (
                name == "connect"
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func) == "sqlite3.connect"
            ):
                found.append("connect()")
    return found


def test_transactions_begin_and_commit_in_one_place() -> None:
    planted = ast.parse("tx.execute('BEGIN IMMEDIATE')\nc.commit()\nc.execute('commit;')\nsqlite3.connect(path)")
    assert sorted(transaction_statements(planted)) == ["begin immediate", "commit()", "commit;", "connect()"]
    assert objections(DAEMON, transaction_statements, but=("db.py",)) == {}
    stated = transaction_statements(tree_of(DAEMON / "db.py"))
    assert stated.count("begin immediate") == stated.count("commit") == 1
    assert stated.count("connect()") == 2  # the lane's own, and a backup's copy


BUILT_ONCE = frozenset({"Database", "Worker", "Acceptor", "Api", "Spool", "Gates", "Upkeep", "Backups", "Reserve"})


def constructions(tree: ast.Module) -> Found:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "") for call in calls]
    return [name for name in names if name in BUILT_ONCE]


def test_only_the_daemon_constructs() -> None:
    assert constructions(ast.parse("a = db.Database(path)\nb = Worker()\nc = open(path)")) == ["Database", "Worker"]
    assert objections(DAEMON, constructions, but=("daemon.py",)) == {}
    assert set(constructions(tree_of(DAEMON / "daemon.py"))) == BUILT_ONCE


def loggings(tree: ast.Module) -> Found:
    found = [name for name in imported_modules(tree) if name.split(".")[0] in {"logging", "syslog", "warnings"}]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in {"logger", "_logger", "log"}:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_only_the_catalogue_of_events_logs() -> None:
    assert loggings(ast.parse("import logging\nself.logger.info('x')")) == ["logging", "2: self.logger.info"]
    assert objections(DAEMON, loggings, but=("events.py", "server.py", "wire.py")) == {}
    # Another library's warning is silenced there, and nothing is said.
    source = (DAEMON / "wire.py").read_text(encoding="utf-8")
    assert re.findall(r"warnings\.\w+\(.*\)", source) == [
        "warnings.catch_warnings()",
        'warnings.simplefilter("ignore")',
    ]
    assert "logging" not in source


def test_the_server_touches_logging_only_to_silence_the_one_it_uses() -> None:
    uses = [
        ast.unparse(node)
        for node in ast.walk(tree_of(DAEMON / "server.py"))
        if isinstance(node, ast.Call) and "logging" in ast.unparse(node.func)
    ]
    assert uses
    assert all(re.fullmatch(r"logging\.getLogger\('uvicorn[a-z.]*'\)(\..*)?", use) for use in uses)


# The database repeats the words of the contract.

ON_THE_ATTEMPT_ONLY = {
    wire.Reason.CONNECT_LIMIT,
    wire.Reason.FIRST_BYTE_LIMIT,
    wire.Reason.IDLE_LIMIT,
    wire.Reason.TOTAL_LIMIT,
    wire.Reason.OUTPUT_LIMIT,
    wire.Reason.DAEMON_STOPPED,
}


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The SQL of every table, index and view, as the newest migration leaves it."""
    path = tmp_path_factory.mktemp("schema") / "brainlane.db"
    database = Database(path)
    database.open()
    database.close()
    connection = sqlite3.connect(path)
    found = dict(connection.execute("select name, sql from sqlite_master where sql is not null"))
    connection.close()
    return found


def check_list(sql: str, column: str) -> set[str]:
    listed = re.search(rf"check \({column} in \(([^)]*)\)\)", sql)
    assert listed is not None, f"no check of {column}"
    return set(re.findall(r"'([^']*)'", listed[1]))


@pytest.mark.parametrize(
    ("table", "column", "words"),
    [
        ("jobs", "status", set(wire.Status)),
        ("jobs", "reason", set(wire.Reason) - ON_THE_ATTEMPT_ONLY),
        ("jobs", "priority", set(wire.Priority)),
        ("job_attempts", "status", set(wire.AttemptStatus)),
        ("decisions", "action", {*wire.Decision, "retry", "forget"}),
    ],
)
def test_the_checks_of_the_database_list_the_words_of_the_contract(
    schema: dict[str, str], table: str, column: str, words: set[str]
) -> None:
    assert check_list(schema[table], column) == words


def test_the_database_ties_the_time_of_the_end_to_the_final_statuses(schema: dict[str, str]) -> None:
    tied = re.search(r"check \(\(status in \(([^)]*)\)\) = \(finished_at is not null\)\)", schema["jobs"])
    assert tied is not None
    assert set(re.findall(r"'([^']*)'", tied[1])) == states.FINAL


def test_the_view_gives_every_cause_of_waiting_but_the_one_that_no_database_can_know(schema: dict[str, str]) -> None:
    derived = schema["operator_view"].partition(" as waiting")[0]
    assert set(re.findall(r"(?:then|else) '([a-z-]+)'", derived)) == set(wire.Waiting) - {wire.Waiting.ANSWER_WAITING}


# Size.


@pytest.mark.parametrize(
    "path", [*sources(DAEMON), *sources(CLIENT)], ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_no_module_has_outgrown_its_reason(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
