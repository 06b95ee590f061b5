"""The man pages hold what the code does: every command, key, word, path and field, and nothing that is not there.

A page is read as its source: sections, subsections, and the entries that `.TP` makes of them. What the code knows is
asked of the code itself (the parsers of the command lines, the configuration, the tables of the contract, a lane that
runs), so a word that is added and not explained fails here, and so does one that is explained and gone.
"""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import typer

import brainlaned.__main__ as daemon_program
from brainctl import cli
from brainlaned import api, config
from brainlaned.wire import (
    EXIT_OF_KIND,
    HTTP_OF_KIND,
    DaemonExit,
    Decision,
    ErrorKind,
    Exit,
    Flag,
    GateReason,
    Reason,
    Status,
    Waiting,
)
from tests.brainserver import BrainServer, close_before_answer
from tests.lane import Lane, config_for, living

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "man").glob("*.[1-8]"))
BRAINCTL, BRAINLANED = ROOT / "man/brainctl.1", ROOT / "man/brainlaned.8"
CONFIGURATION, API = ROOT / "man/brainlaned.toml.5", ROOT / "man/brainlaned-api.7"
RECOVERY = ROOT / "man/brainlane-recovery.7"

Section = tuple[str, str]
"""The names of a section and of a subsection of it; what stands before the first of those has "" for it."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# How a page is read.

ESCAPES = {r"\-": "-", r"\(aq": "'", r"\(ga": "`", r"\(ha": "^", r"\(ti": "~", r"\&": "", r"\e": "\\"}
FONTS = re.compile(r"\.(?:[BI]|BI|BR|IB|IR|RB|RI|SM|SB) ")


def plain(text: str) -> str:
    """Take fonts and escapes away."""
    text = re.sub(r"\\f[BIRP]", "", text)
    return re.sub("|".join(map(re.escape, ESCAPES)), lambda found: ESCAPES[found[0]], text)


def words_of(line: str) -> str:
    """Return what a line of a page shows: of a line that only chooses fonts its words, of any other macro nothing."""
    if not line.startswith("."):
        return plain(line)
    if not FONTS.match(line):
        return ""
    macro, _, rest = line.partition(" ")
    words = [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', rest)]
    return plain(("" if len(macro) == 3 else " ").join(words))


def sections_of(page: Path) -> dict[Section, list[str]]:
    """Return the lines of each section and subsection."""
    found: dict[Section, list[str]] = {}
    here = ("", "")
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith(".SH "):
            here = (words_of(f".B {line[4:]}"), "")
        elif line.startswith(".SS "):
            here = (here[0], words_of(f".B {line[4:]}"))
        else:
            found.setdefault(here, []).append(line)
    return found


def entries_of(page: Path, section: str, subsection: str = "") -> dict[str, str]:
    """Return the entries of a section, each with its text; a tag that names several things is an entry for each."""
    found: dict[str, str] = {}
    for block in "\n".join(["", *sections_of(page)[section, subsection]]).split("\n.TP\n")[1:]:
        tag, *lines = block.split("\n.PP")[0].split("\n")
        text = " ".join(filter(None, map(words_of, lines)))
        for name in words_of(tag).split(", "):
            assert name not in found, f"{name} is explained twice"
            found[name] = text
    return found


def listed(page: Path, section: str, subsection: str = "") -> dict[str, str]:
    """Return entries as they are tagged, where a comma belongs to one thing."""
    lines = "\n".join(["", *sections_of(page)[section, subsection]]).split("\n.TP\n")[1:]
    return {words_of(block.split("\n")[0]): block for block in lines}


def examples_of(page: Path) -> list[str]:
    """Return what stands between .EX and .EE, as it is read."""
    blocks = re.findall(r"^\.EX\n(.*?)^\.EE$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [plain(block) for block in blocks]


def prose_of(page: Path) -> str:
    text = re.sub(r"^\.EX\n.*?^\.EE$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return "\n".join(map(words_of, text.splitlines()))


def values(*words: type[StrEnum]) -> list[str]:
    return [word.value for kind in words for word in kind]


# The command lines.


def commands() -> dict[str, Any]:
    """Return every command of brainctl that is not hidden, and brainctl itself under the name ""."""
    # The callable of the program, with the parser inside.
    whole = typer.main.get_command(cli.application([], complete=False).func)  # type: ignore[attr-defined]
    return {"": whole, **{name: each for name, each in whole.commands.items() if not each.hidden}}


COMMANDS = commands()
DAEMON = typer.main.get_command(daemon_program.app)


def options(command: Any) -> dict[str, str]:
    """Return each name of an option with what its value is called ("" for a flag)."""
    found = {}
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            value = "" if parameter.is_flag else parameter.metavar or "|".join(parameter.type.choices)
            found |= dict.fromkeys(parameter.opts, value)
    return found


def explained(tags: dict[str, str]) -> dict[str, str]:
    """Return the same as `options`, of the tags of a page."""
    return {name: value for tag in tags for name, _, value in (each.partition(" ") for each in tag.split(", "))}


def subsection_of(command: str) -> str:
    return next(
        name for section, name in sections_of(BRAINCTL) if section == "COMMANDS" and name.split()[:1] == [command]
    )


def test_the_page_explains_the_options_before_the_verb() -> None:
    assert explained(listed(BRAINCTL, "OPTIONS")) == {**options(COMMANDS[""]), "--help": ""}


def test_the_page_has_every_command_in_the_order_of_the_help() -> None:
    shown = [name.split()[0] for section, name in sections_of(BRAINCTL) if section == "COMMANDS" and name]
    assert shown == [name for name in COMMANDS if name]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name])
def test_the_page_explains_the_options_of_a_command(command: str) -> None:
    arguments = [each.metavar for each in COMMANDS[command].params if each.param_type_name == "argument"]
    assert subsection_of(command) == " ".join([command, *arguments])
    assert explained(listed(BRAINCTL, "COMMANDS", subsection_of(command))) == options(COMMANDS[command])


@pytest.mark.parametrize(("page", "package"), [(BRAINCTL, "brainctl"), (BRAINLANED, "brainlaned")])
def test_every_variable_that_a_program_looks_at_is_explained(page: Path, package: str) -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / package).rglob("*.py"))
    asked = re.findall(r'environ(?:ment)?(?:\.get\(|\.pop\(|\[)"([A-Z][A-Z_]+)"', sources)
    asked += re.findall(r'"([A-Z][A-Z_]+)" (?:not )?in (?:os\.)?environ', sources)
    if package == "brainctl":
        asked += [each.envvar for command in COMMANDS.values() for each in command.params if getattr(each, "envvar", 0)]
    of_python_and_shells = {"PYTHONPATH", "COMP_WORDS"}
    assert set(asked) >= ({"BRAINLANE_SOCKET", "NO_COLOR"} if package == "brainctl" else {"STATE_DIRECTORY"})
    assert set(asked) - of_python_and_shells <= set(entries_of(page, "ENVIRONMENT"))


def test_the_page_explains_the_options_of_the_daemon() -> None:
    assert explained(listed(BRAINLANED, "OPTIONS")) == {**options(DAEMON), "--help": ""}


@each_page
def test_no_page_speaks_of_an_option_that_does_not_exist(page: Path) -> None:
    known = set().union(*map(options, [*COMMANDS.values(), DAEMON])) | {"--help"}
    of_others = {"--append", "--groups"}  # usermod
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", prose_of(page))) <= known | of_others


def called(page: Path, program: str) -> Iterator[list[str]]:
    """Yield the words after a program's name, for each time that an example calls it."""
    for line in "\n".join(examples_of(page)).replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        told = list(words)
        for index, word in enumerate(told):
            if word == program:
                end = next((i for i in range(index, len(told)) if set(told[i]) <= set("|;<>&()")), len(told))
                # xargs adds what it reads.
                yield [*told[index + 1 : end], *(["17"] if told[index - 1 : index] == ["xargs"] else [])]


BRAINCTL_CALLS = [words for page in PAGES for words in called(page, "brainctl")]
DAEMON_CALLS = [words for page in PAGES for words in called(page, "brainlaned")]


def test_there_are_examples_of_both_programs() -> None:
    assert len(BRAINCTL_CALLS) >= 12 and len(DAEMON_CALLS) >= 1


@pytest.mark.parametrize("words", BRAINCTL_CALLS, ids=" ".join)
def test_an_example_of_brainctl_is_understood_by_it(words: list[str]) -> None:
    whole = COMMANDS[""]
    context = whole.make_context("brainctl", list(words))
    name, command, rest = whole.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("words", DAEMON_CALLS, ids=" ".join)
def test_an_example_of_brainlaned_is_understood_by_it(words: list[str]) -> None:
    DAEMON.make_context("brainlaned", list(words))


@pytest.mark.parametrize(("page", "statuses"), [(BRAINCTL, Exit), (BRAINLANED, DaemonExit)])
def test_every_exit_status_is_explained(page: Path, statuses: type[Exit] | type[DaemonExit]) -> None:
    ctrl_c = ["130"] if statuses is Exit else []
    assert list(entries_of(page, "EXIT STATUS")) == [*(str(int(status)) for status in statuses), *ctrl_c]


# The configuration.

LANE_TABLES = {"[lane]": "lane", "[lane.head_start_s]": "lane.head_start_s", "[access]": "access"}
OF_ANY_ROUTE = "[routes.NAME]"
OF_A_KIND = {"openai": "[routes.NAME] of kind openai", "command": "[routes.NAME] of kind command"}
NEEDED = {
    "openai": {"base_url": "http://127.0.0.1/v1", "model": "m"},
    "command": {"kind": "command", "command": ["x"]},
}
SAID_IN_WORDS = {'the only route, else "local"', "keep_days", "none", "the name of the program"}


@dataclass(frozen=True)
class Key:
    """One entry of the page."""

    table: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.table} {self.name}"

    @property
    def kind(self) -> str:
        """Return the kind of route to try it in."""
        return "command" if self.table == OF_A_KIND["command"] else "openai"


KEYS = [
    Key(table, name, text)
    for table in (*LANE_TABLES, OF_ANY_ROUTE, *OF_A_KIND.values())
    for name, text in entries_of(CONFIGURATION, "KEYS", table).items()
]
EXAMPLE = next(block for block in examples_of(CONFIGURATION) if "[lane]" in block)


def document_with(key: Key, value: object, kind: str) -> dict[str, Any]:
    """Return a configuration that says what it must, and this key."""
    route = dict(NEEDED[kind])
    document: dict[str, Any] = {"routes": {"local": route}}
    place = route
    if key.table in LANE_TABLES:
        place = document
        for step in LANE_TABLES[key.table].split("."):
            place = place.setdefault(step, {})
    place[key.name] = value
    return document


def complaint(document: dict[str, Any]) -> str:
    try:
        config.parse(document)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_key_of_the_page_is_one_of_the_configuration(key: Key) -> None:
    # None is of no type that a key can have, so whatever is known is refused for that, and what is not by its name.
    assert re.search(r"and must be|is missing", complaint(document_with(key, object(), key.kind)))


@pytest.mark.parametrize("key", [key for key in KEYS if key.table in OF_A_KIND.values()], ids=str)
def test_a_key_of_one_kind_of_route_is_refused_in_the_other(key: Key) -> None:
    both = [
        name
        for name in entries_of(CONFIGURATION, "KEYS", OF_A_KIND["openai"])
        if name in entries_of(CONFIGURATION, "KEYS", OF_A_KIND["command"])
    ]
    other = "openai" if key.kind == "command" else "command"
    document = document_with(key, object(), other)
    assert ("is not a key of the configuration" in complaint(document)) == (key.name not in both)


def test_the_page_explains_every_key_that_the_configuration_is_asked_for() -> None:
    asked = {
        call.args[0].value
        for call in ast.walk(ast.parse(Path(config.__file__).read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in {"text", "boolean", "number", "seconds", "days", "whole", "texts", "names_list", "table"}
        and isinstance(call.args[0], ast.Constant)
    }
    assert {"lane", "routes", "keep_payload_days", "exit_status"} <= asked
    tables = {
        word for section, name in sections_of(CONFIGURATION) if section == "KEYS" for word in re.findall(r"\w+", name)
    }
    assert asked - {key.name for key in KEYS} - tables == set()


def default_of(key: Key) -> object:
    """Return what the configuration says where nobody says it."""
    found = config.parse({"routes": {"local": NEEDED[key.kind]}})
    if key.name == "kind":
        return "command" if found.routes["local"].command else "openai"
    if key.table == "[access]":
        return list(getattr(found.access, key.name))
    if key.table == "[lane.head_start_s]":
        return {priority.value: seconds for priority, seconds in found.head_start_s.items()}[key.name]
    return getattr(found if key.table == "[lane]" else found.routes["local"], key.name)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_page_names_the_default_of_a_key(key: Key) -> None:
    said = re.search(r"(?:; default: (.+?)|; (required))\.(?: |$)", key.text)
    assert said is not None, key.text
    if said[2]:
        without = {"routes": {"local": {name: value for name, value in NEEDED[key.kind].items() if name != key.name}}}
        assert complaint(without) == f"routes.local.{key.name} is missing"
    elif said[1] not in SAID_IN_WORDS:
        assert tomllib.loads(f"x = {said[1]}")["x"] == default_of(key)


def test_the_example_of_the_configuration_is_one_and_holds_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openai").write_text("a-key")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    found = config.parse(tomllib.loads(EXAMPLE))
    plainest = config.parse(
        {"routes": {"local": {"base_url": found.routes["local"].base_url, "model": "smollm2-135m"}}}
    )
    assert {name: getattr(found, name) for name in ("default_route", "access", "stop_grace_s", "crash_limit")} == {
        name: getattr(plainest, name) for name in ("default_route", "access", "stop_grace_s", "crash_limit")
    }
    assert (found.max_queued, found.disk_reserve_mib, found.head_start_s) == (
        plainest.max_queued,
        plainest.disk_reserve_mib,
        plainest.head_start_s,
    )
    assert (found.keep_days, found.keep_payload_days) == (plainest.keep_days, plainest.keep_payload_days)
    assert found.routes["local"] == plainest.routes["local"]
    assert found.routes["paid"].api_key is not None and found.routes["tool"].command


def test_the_example_of_the_configuration_has_every_key() -> None:
    # What stands behind "# " there is one key of two that exclude each other, or needs a file of the machine.
    everything = re.sub(r"^# (\w+ = )", r"\1", EXAMPLE, flags=re.MULTILINE)
    document = tomllib.loads(everything)
    routes = document["routes"]
    for key in KEYS:
        if key.table in LANE_TABLES:
            place = document
            for step in LANE_TABLES[key.table].split("."):
                place = place[step]
            assert key.name in place, str(key)
        else:
            assert any(key.name in route for route in routes.values()), str(key)
    assert {"headers", "environment", "secrets", "exit_status"} <= set().union(*routes.values())


def test_the_page_explains_what_an_exit_status_may_mean() -> None:
    meanings = entries_of(CONFIGURATION, "KEYS", "[routes.NAME.exit_status]")
    for meaning in meanings:
        assert complaint({"routes": {"local": {**NEEDED["command"], "exit_status": {"75": meaning}}}}) == ""
    for status, meaning in config.EXIT_STATUSES.items():
        assert f"what {status} means where nothing is said" in meanings[meaning]


# Bounds.

KIB, MIB = 1024, 1024 * 1024
TOLD = {
    # (module, name of the constant): (entry, what is said of it, unit)
    ("server", "MAX_HEAD_BYTES"): ("head", "{} KiB", KIB),
    ("server", "REQUEST_S"): ("head", "within {} seconds", 1),
    ("wire", "MAX_BODY_BYTES"): ("body", "{} MiB", MIB),
    ("api", "BODY_S"): ("body", "within {} seconds", 1),
    ("wire", "MAX_NESTING"): ("body", "{} levels", 1),
    ("wire", "MAX_KEY_BYTES"): ("key", "1 to {} bytes", 1),
    ("wire", "MAX_LABELS"): ("labels", "At most {};", 1),
    ("wire", "MAX_LABEL_VALUE_BYTES"): ("labels", "at most {} bytes", 1),
    ("wire", "MAX_LIST"): ("list", "At most {} jobs", 1),
    ("wire", "MAX_WAIT_S"): ("wait", "At most {} seconds", 1),
    ("wire", "MAX_SOCKET_PATH_BYTES"): ("socket", "at most {} bytes", 1),
    ("queries", "POSITION_BOUND"): ("position", "first {} in line", 1),
    ("wire", "MAX_REASON_BYTES"): ("reason", "{} bytes", 1),
    ("wire", "MAX_MODEL_BYTES"): ("model", "{} bytes", 1),
    ("wire", "MAX_ATTEMPTS"): ("max_attempts", "1 to {}.", 1),
    ("api", "MOST_BODY_BYTES"): ("body", "at a time: {} MiB", MIB),
    ("events", "MOST_LINES"): ("lines", "{} lines wait", 1),
    ("queries", "TYPICAL_OF"): ("typical_s", "last {} answers", 1),
    ("waiters", "MOST"): ("waiters", "{} may wait", 1),
    ("server", "MOST_CONNECTIONS"): ("connections", "{} at a time", 1),
    ("server", "OTHER_DESCRIPTORS"): ("connections", "{} less than the files", 1),
    ("server", "KEPT_CONNECTIONS"): ("connections", "{} more are kept", 1),
    ("daemon", "DESCRIPTORS"): ("connections", "asks for {}", 1),
    ("daemon", "BACKLOG"): ("connections", "{} may wait to be taken", 1),
    ("server", "KEEP_ALIVE_S"): ("idle connection", "after {} seconds", 1),
    ("server", "ANSWER_S"): ("slow reader", "for {} seconds", 1),
    ("acceptor", "BATCH"): ("commit", "Up to {} requests", 1),
    ("api", "READERS"): ("readers", "{} requests read", 1),
    ("db", "BUSY_S"): ("foreign lock", "waits {} seconds", 1),
    ("db", "LONG_LOG_BYTES"): ("write-ahead log", "over {} MiB", MIB),
    ("upkeep", "PIN_AGAIN_S"): ("write-ahead log", "after {} seconds", 1),
    ("upkeep", "SOONEST_S"): ("upkeep", "once in {} seconds", 1),
    ("upkeep", "LATEST_S"): ("upkeep", "once in {} hours", 3600),
    ("retention", "BUDGET_S"): ("upkeep", "about {} milliseconds", 0.001),
    ("brains.http", "RESOLVE_S"): ("name", "{} seconds", 1),
    ("brains.http", "USAGE_S"): ("usage", "for {} seconds", 1),
    ("brains.http", "MODELS_S"): ("list of models", "within {} seconds", 1),
    ("brains.command", "COMPLAINT_CHARACTERS"): ("quotes", "{} characters", 1),
    ("brains.command", "GRACE_S"): ("command", "{} seconds between", 1),
    ("brains.command", "STOPPED_GRACE_S"): ("command", ", {} where the daemon", 1),
    ("spool", "SYNC_S"): ("spool", "than {} second", 1),
    ("worker", "STORE_AGAIN_S"): ("answer that cannot be stored", "every second", 1),
    ("daemon", "ABANDON_S"): ("abandoned call", "within {} seconds", 1),
}
OF_NO_CONCERN = {
    "access.GROUPS_KEPT_S",  # told with [access]
    "brains.command.LOOK_AGAIN_S",  # a sleep that nobody notices
    "brains.command.SYNC_S",  # that of the spool
    "daemon.STEP_S",  # told to systemd alone
    "daemon.UNIT_GRACE_S",  # told with stop_grace_s
    "db.MARK_PATIENCE_S",  # a mark that is written again
    "config.MAX_OUTPUT_MIB",  # told with its key
    "brains.http.BACKSTOP_S",  # our own clock comes first
    "worker.VAIN_S",  # looks that find nothing
    "events.GATHER_S",  # lines that are written together
    "events.SELDOM_S",  # told as a minute
    "filesystem.MIB",  # a unit
    "gate.JITTER",  # told with retry_cap_s
    "localbrain.CONTEXT_TOKENS",  # of the bundled model
    "localbrain.DEFAULT_PORT",
    "localbrain.EVERYTHING",
    "localbrain.SILENT",
    "server.BODY_GRACE_S",  # on top of the time for a body, for one that nobody reads
    "server.DRAIN_S",  # the end of the daemon
    "streams.PIECE_BYTES",  # a reader's memory
    "turnaway.PATIENCE_S",  # likewise
    "upkeep.BETWEEN_S",  # a pause that lets others pass
    "watchdog.IDLE_BESIDE_WORK_S",  # told to systemd alone
    "watchdog.STATUS_S",
    "worker.DISK_AGAIN_S",  # told with disk_reserve_mib
    "worker.MARK_S",  # a mark that is written again
    "worker.STEP_S",  # told to the watchdog alone
}


def bounds_of_the_page() -> dict[str, str]:
    found: dict[str, str] = {}
    for section, name in sections_of(CONFIGURATION):
        if section == "BOUNDS" and name:
            found |= entries_of(CONFIGURATION, "BOUNDS", name)
    return found


@pytest.mark.parametrize(("constant", "told"), TOLD.items(), ids=[".".join(each) for each in TOLD])
def test_the_page_tells_a_fixed_bound(constant: tuple[str, str], told: tuple[str, str, float]) -> None:
    module, name = constant
    entry, words, unit = told
    value = getattr(importlib.import_module(f"brainlaned.{module}"), name) / unit
    assert words.format(f"{value:.15g}") in bounds_of_the_page()[entry]


def test_every_fixed_number_is_told_or_concerns_nobody() -> None:
    numbers = set()
    for path in (ROOT / "brainlaned").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "brainlaned").with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                is_public = re.fullmatch("[A-Z][A-Z0-9_]*", name) is not None
                # A text, a table or a set has something else in it than numbers and signs.
                if is_public and re.fullmatch(r"[0-9_.*+() -]+", ast.unparse(node.value)):
                    numbers.add(f"{module}.{name}")
    assert len(numbers) >= 40
    assert numbers - {".".join(constant) for constant in TOLD} == OF_NO_CONCERN


# The words of the contract.


@pytest.mark.parametrize(
    ("subsection", "words"),
    [
        ("Reasons", Reason),
        ("What a queued job waits for", Waiting),
        ("Why a route is closed", GateReason),
        ("Flags", Flag),
    ],
)
def test_every_word_is_explained_with_what_to_do_next(subsection: str, words: type[StrEnum]) -> None:
    found = entries_of(RECOVERY, "WHAT AN OPERATOR MAY DO", subsection)
    assert list(found) == values(words)
    assert [word for word, text in found.items() if not re.search(r"\S.* Next: \S", text)] == []


def test_every_kind_of_error_is_explained_with_its_status() -> None:
    answered, own = entries_of(API, "ERRORS"), entries_of(BRAINCTL, "ERRORS")
    assert list(answered) == [kind.value for kind in HTTP_OF_KIND]
    assert list(own) == [kind.value for kind in ErrorKind if kind not in HTTP_OF_KIND]
    for kind, status in HTTP_OF_KIND.items():
        assert answered[kind].startswith(f"HTTP {status}. "), kind
    for kind, text in own.items():
        assert text.startswith(f"Exit {int(EXIT_OF_KIND[ErrorKind(kind)])}. "), kind


@pytest.mark.parametrize("decision", list(Decision))
def test_a_decision_is_explained_with_its_path(decision: Decision) -> None:
    text = entries_of(API, "PATHS", "POST /v1/jobs/{id}/recover")["action"]
    assert re.search(rf"\b{decision}\b", text)


def test_every_path_is_explained_with_its_role() -> None:
    shown = {name: lines for (section, name), lines in sections_of(API).items() if section == "PATHS" and name}
    assert list(shown) == [f"{method} {path}" for method, path, _, _ in api.TABLE]
    for method, path, role, _ in api.TABLE:
        assert shown[f"{method} {path}"][0] == f"Role: {role.name.lower()}."


# What a lane really answers.


@dataclass(frozen=True)
class Busy:
    """A lane with a job at each place."""

    lane: Lane
    done: int
    decided: int
    held: int
    running: int
    queued: int


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    with BrainServer() as server:
        lane = Lane(tmp_path_factory.mktemp("lane"), config_for(server.base_url))
        lane.start().stop()  # so that there is a last run
        with living(lane, server.release):
            server.script(close_before_answer(), close_before_answer(), server.default, server.hold())
            decided, held, done, running, queued = (
                lane.submit(word, labels={"batch": "seas"})["id"]
                for word in ("decided", "held", "done", "running", "queued")
            )
            assert lane.wait(decided)["status"] == lane.wait(held)["status"] == "held"
            assert lane.post(f"/v1/jobs/{decided}/recover", {"action": "fail", "reason": "why not"}).status == 200
            lane.wait_for_status(running, "running")
            yield Busy(lane, done, decided, held, running, queued)


def test_the_page_names_whatever_lies_in_a_state_directory(busy: Busy, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SERVICE_RESULT": "watchdog"}
    command = [sys.executable, "-m", "brainlaned", "--record-stop", "--state-dir", tmp_path]
    subprocess.run(command, env=environment, check=True, timeout=60)
    there = {path.name for directory in (busy.lane.state_dir, tmp_path) for path in directory.iterdir()}
    assert len(there) == 5
    files = "\n".join(map(words_of, sections_of(BRAINLANED)["FILES", ""]))
    assert [name for name in there if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", files)] == []


def fields(found: Any, before: str = "") -> set[str]:
    """Return the names of all fields of an object of the wire, but for those that the sender chooses."""
    names = set()
    for name, value in found.items():
        inner = value[0] if isinstance(value, list) and value else value
        # Labels, usage and flags hold what others put in.
        if isinstance(inner, dict) and name not in {"labels", "usage"}:
            names |= fields(inner, f"{before}{name}{'[]' if isinstance(value, list) else ''}.")
        else:
            names.add(before + name)
    return names


def test_the_page_explains_every_field_of_a_job(busy: Busy) -> None:
    shown = busy.lane.get(f"/v1/jobs/{busy.decided}").json
    accepted = busy.lane.submit("queued", key="once")
    in_a_list = busy.lane.get("/v1/jobs").json["jobs"][0]
    inside = {"attempts": shown.pop("attempts"), "decisions": shown.pop("decisions")}
    assert set(inside) | fields(shown) | fields(accepted) == set(entries_of(API, "THE JOB OBJECT"))
    assert fields(in_a_list) == fields(shown)


@pytest.mark.parametrize(
    ("section", "name"), [("THE ATTEMPT OBJECT", "attempts"), ("THE DECISION OBJECT", "decisions")]
)
def test_the_page_explains_every_field_of_what_a_job_holds(busy: Busy, section: str, name: str) -> None:
    assert fields(busy.lane.get(f"/v1/jobs/{busy.decided}").json[name][0]) == set(entries_of(API, section))


def test_the_page_explains_every_field_of_the_status(busy: Busy) -> None:
    found = busy.lane.get("/v1/status").json
    assert found["running"]["id"] == busy.running and found["last_run"] and found["needs_person"]
    assert fields(found) == set(entries_of(API, "THE STATUS OBJECT"))


def test_the_page_explains_every_field_of_an_error(busy: Busy) -> None:
    error = busy.lane.post("/v1/jobs", {}).error
    (shape,) = (block for block in examples_of(API) if block.startswith('{"error"'))
    assert set(re.findall(r'"(\w+)": \.\.\.', shape)) == set(error)


def test_the_page_explains_every_event_of_a_stream(busy: Busy) -> None:
    source = (ROOT / "brainlaned/streams.py").read_text(encoding="utf-8")
    told = set(entries_of(API, "THE STREAM"))
    assert told == set(re.findall(r'_event\("(\w+)"', source))
    came = busy.lane.get(f"/v1/jobs/{busy.done}/stream").body.decode()
    assert set(re.findall(r"^event: (\w+)$", came, re.MULTILINE)) == told - {"restart"}


def asked(method: str) -> set[str]:
    """Return the parameters or the fields that the page names for the paths of a method."""
    paths = [name for section, name in sections_of(API) if section == "PATHS" and name.startswith(method)]
    return {entry for path in paths for entry in entries_of(API, "PATHS", path)}


def test_the_page_explains_every_parameter_and_every_field_of_a_body() -> None:
    query = (ROOT / "brainlaned/parameters.py").read_text(encoding="utf-8")
    taken = {name for call in re.findall(r"_only\(query, (.+)\)", query) for name in re.findall(r'"(\w+)"', call)}
    flags = re.findall(r'parameters\.flag\(.+, "(\w+)"\)', Path(api.__file__).read_text(encoding="utf-8"))
    assert taken | set(flags) == asked("GET")
    body = (ROOT / "brainlaned/intake.py").read_text(encoding="utf-8")
    assert set(re.findall(r'(?:\.take\(|_short\(fields, )"(\w+)"', body)) == asked("POST")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_every_example_of_the_socket_works_as_it_stands(busy: Busy, tmp_path: Path) -> None:
    lines = sections_of(API)["EXAMPLES", ""]
    scripts = [block.split("\n.EE")[0] for block in "\n".join(lines).split("\n.EX\n")[1:]]
    jobs = {"JOB": busy.done, "HELD": busy.held, "QUEUED": busy.queued}
    environment = {**os.environ, "SOCKET": str(busy.lane.socket), **{name: str(job) for name, job in jobs.items()}}
    said = {}
    for script in map(plain, scripts):
        if "sqlite3" in script and shutil.which("sqlite3") is None:
            continue
        made = subprocess.run(
            ["sh", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert (made.returncode, made.stderr) == (0, ""), f"{script}\n{made.stdout}"
        said[script] = made.stdout
    assert len(said) >= 11
    assert "201\n200\n" in said.values()
    told = busy.lane.get(f"/v1/jobs/{busy.held}").json
    assert (told["reason"], told["flags"]) == ("operator-completed", ["operator-text"])
    assert busy.lane.get(f"/v1/jobs/{busy.queued}").json["status"] == Status.CANCELLED
    assert busy.lane.get(f"/v1/jobs/{busy.done}").json["erased_at"] is not None


# Whom a page, a unit and a message send their reader to.


def is_a_page(name: str, section: str) -> bool:
    return (ROOT / f"man/{name}.{section}").is_file()


OURS = re.compile(r"\b(brain[a-z.-]+)\(([1-8])\)")


@each_page
def test_a_page_names_only_pages_of_ours_that_exist_and_itself_not(page: Path) -> None:
    named = set(OURS.findall(prose_of(page)))
    see_also = OURS.findall("\n".join(map(words_of, sections_of(page)["SEE ALSO", ""])))
    assert see_also and [each for each in named if not is_a_page(*each)] == []
    assert page.name not in [".".join(each) for each in see_also]


def test_every_page_is_named_by_another() -> None:
    named = {
        each for page in PAGES for each in OURS.findall("\n".join(map(words_of, sections_of(page)["SEE ALSO", ""])))
    }
    assert sorted(".".join(each) for each in named) == [page.name for page in PAGES]


@pytest.mark.parametrize(
    "unit", sorted([*ROOT.glob("systemd/*.*"), ROOT / "packaging/brainlane.catalog"]), ids=lambda unit: unit.name
)
def test_the_documentation_of_a_unit_exists(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8")
    named = re.findall(r"man:([\w.@-]+)\(([1-8])\)", text)
    assert named, "nothing is named"
    assert [each for each in named if not (is_a_page(*each) or each[0].startswith("systemd"))] == []


def test_a_page_that_a_message_names_exists() -> None:
    named = {
        name
        for directory in ("brainlaned", "brainctl")
        for path in (ROOT / directory).rglob("*.py")
        for name in re.findall(r"""["' ]man ([a-z][a-z.-]+)["';,]""", path.read_text(encoding="utf-8"))
    }
    assert named >= {"brainlaned-api", "brainlaned.toml"}
    assert {name for name in named if not list((ROOT / "man").glob(f"{name}.[1-8]"))} == set()


def test_the_readme_names_every_page() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Pages\n")[2].partition("\n## ")[0]
    named = re.findall(r"`([a-z.-]+)\(([1-8])\)`", section)
    assert sorted(".".join(each) for each in named) == [page.name for page in PAGES]


# How the pages are written; that groff takes them is shown with the events.


@each_page
def test_no_line_is_longer_than_the_others_of_the_tree(page: Path) -> None:
    assert [line for line in page.read_text(encoding="utf-8").splitlines() if len(line) >= 120] == []


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
@each_page
def test_mandoc_has_nothing_to_complain_about(page: Path) -> None:
    # Style is left out: it would have lines of 80.
    made = subprocess.run(["mandoc", "-Tlint", "-Wwarning", page], capture_output=True, text=True, timeout=20)
    assert (made.returncode, made.stdout + made.stderr) == (0, "")
