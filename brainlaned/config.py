"""The configuration: one TOML file, read once at start, checked key by key.

Owns every default and every bound. An unknown key, a wrong type, a zero or negative limit is refused with the
key's full name and its value, so that a typing error cannot switch a limit off. Keys of providers are read here and
nowhere else; their type hides them from repr, and `Route.secrets` lists what must be removed from any text about that
route.
"""

import base64
import dataclasses
import math
import os
import re
import ssl
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from . import errors, wire

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")
_URL = re.compile(r"[\x21-\x7e]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile("key|token|secret|auth|sig|pass|cookie|cred", re.IGNORECASE)
_HARMLESS_NAME = re.compile("version|referer|title|agent|accept|content|organi[sz]ation|project|beta", re.IGNORECASE)
_LONG = 10
_HIDDEN = re.compile(r"(api_key|proxy|base_url)$|\.(headers|secrets)\.")
_SHORTEST_SECRET = 4  # removing shorter ones from texts would only garble them

MAX_OUTPUT_MIB = 256
"""The most that max_output_mib may be: a few times as much is held in memory, and SQLite stores a billion bytes."""

EXIT_STATUSES = {75: "retry", 2: "fail"}
"""What a command means by its exit status where the route does not say: EX_TEMPFAIL of sysexits.h, and a usage error.

"retry" asks for another try later that uses no attempt, "fail" says that no try can succeed. Any other is an error that
may have cost something.
"""


class Secret:
    """A value that no repr, no log line and no traceback shows. `reveal()` is the one way to it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(...)"


@dataclass(frozen=True, slots=True)
class Route:
    """A named way to a brain. Times are in seconds; all limits are finite.

    A route of kind openai has a base_url, one of kind command a command; what belongs to the other kind is empty.
    """

    name: str
    base_url: str = field(repr=False)
    model: str
    command: tuple[str, ...] = field(default=(), repr=False)
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the command finds in its environment besides the few variables that every one gets."""
    secret_environment: Mapping[str, Secret] = field(default_factory=dict)
    exit_statuses: Mapping[int, str] = field(default_factory=lambda: dict(EXIT_STATUSES))
    may_run_twice: bool = False
    max_attempts: int = 3
    retry_first_s: float = 2
    retry_cap_s: float = 600
    connect_s: float = 10
    first_byte_s: float = 300
    idle_s: float = 120
    total_s: float = 1800
    max_output_mib: int = 32
    api_key: Secret | None = None
    headers: Mapping[str, Secret] = field(default_factory=dict)
    ca_file: Path | None = None
    proxy: Secret | None = None

    @property
    def endpoint(self) -> str:
        """The address as it may be shown: without user, password and query; of a command its program."""
        if self.command:
            return self.command[0]
        parts = urlsplit(self.base_url)
        host = parts.hostname or ""
        shown = f"[{host}]" if ":" in host else host
        return f"{parts.scheme}://{shown}{f':{parts.port}' if parts.port else ''}{parts.path}"

    def secrets(self) -> tuple[str, ...]:
        """Everything that must not appear in a text about this route, the longest first."""
        found = {*_secrets_in(self.base_url), *_secrets_in(self.proxy.reveal() if self.proxy else "")}
        found |= {self.api_key.reveal()} if self.api_key else set()
        found |= {value.reveal() for value in self.secret_environment.values()}
        for name, value in self.headers.items():
            if _is_secret(name, value.reveal()):
                found |= {value.reveal(), *value.reveal().split()}
        return tuple(sorted((text for text in found if len(text) >= _SHORTEST_SECRET), key=len, reverse=True))


def _secrets_in(url: str) -> set[str]:
    """Return what is secret in an address, as it was written and decoded, since either may be echoed."""
    parts = urlsplit(url)
    # A user's name is one only where it stands alone: then it is a token. Else "user" would vanish from every answer.
    found = {parts.password or parts.username or ""}
    found |= {pair.partition("=")[2] for pair in parts.query.split("&") if _is_secret(*pair.partition("=")[::2])}
    found |= {value for name, value in parse_qsl(parts.query) if _is_secret(name, value)}
    found |= {unquote(text) for text in found}
    if parts.password:
        pair = f"{unquote(parts.username or '')}:{unquote(parts.password)}"
        found.add(base64.b64encode(pair.encode()).decode())
    return found


def _is_secret(name: str, value: str) -> bool:
    """Guess by its name, else by its length, whether a value is a secret; what is none must not vanish from answers."""
    return bool(_SECRET_NAME.search(name)) or (len(value) >= _LONG and not _HARMLESS_NAME.search(name))


@dataclass(frozen=True, slots=True)
class OpenRoute:
    """A route that may be asked now. `is_probe`: its gate is closed, and this is the time to knock."""

    route: Route
    is_probe: bool


@dataclass(frozen=True, slots=True)
class Access:
    """Users and @groups by name, for each role, and for what is of others."""

    observe: tuple[str, ...] = ("@brainlane",)
    submit: tuple[str, ...] = ("@brainlane",)
    operate: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    """Who may read the prompts and answers of others; whoever operates may."""


@dataclass(frozen=True, slots=True)
class Config:
    routes: Mapping[str, Route]
    default_route: str
    access: Access = Access()
    stop_grace_s: float = 90
    crash_limit: int = 2
    max_queued: int = 1_000_000
    disk_reserve_mib: int = 64
    keep_days: float = 30
    keep_payload_days: float = 30
    head_start_s: Mapping[wire.Priority, float] = field(
        default_factory=lambda: {wire.Priority.LOW: -3600, wire.Priority.NORMAL: 0, wire.Priority.HIGH: 3600}
    )


def load(path: Path | None) -> Config:
    """Read a configuration file (None: no file, which means the defaults).

    Raises StartRefused (78) with the name of the key and its value.
    """
    if path is None:
        return parse({})
    try:
        text = path.read_bytes().decode()
        return parse(tomllib.loads(text))
    except OSError as error:
        raise _refusal(f"cannot read configuration '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _refusal(f"cannot read configuration '{path}': byte {error.start} is not UTF-8") from error
    except _Wrong as error:
        raise _refusal(f"cannot use configuration '{path}': {error}") from error
    except (ValueError, RecursionError) as error:
        raise _refusal(f"cannot read configuration '{path}': {error}") from error


def parse(document: Mapping[str, Any]) -> Config:
    """Check a parsed configuration and fill in the defaults."""
    root = _Table("", document)
    lane = root.table("lane")
    head_start = lane.table("head_start_s")
    access = root.table("access")
    routes_table = root.table("routes")
    root.end()
    routes = {name: _route(name, routes_table.table(name)) for name in routes_table.names()}
    if not routes:
        routes = {"local": Route("local", "http://127.0.0.1:8377/v1", "smollm2-135m")}
    default_route = lane.text("default_route", next(iter(routes)) if len(routes) == 1 else "local")
    if default_route not in routes:
        raise _Wrong(f"lane.default_route is '{default_route}', and there is no [routes.{default_route}]")
    keep_days = lane.days("keep_days", 30)
    keep_payload_days = lane.days("keep_payload_days", keep_days)
    if keep_payload_days > keep_days:
        raise _Wrong(f"lane.keep_payload_days is {keep_payload_days:g}, and must not be over keep_days, {keep_days:g}")
    config = Config(
        routes=routes,
        default_route=default_route,
        access=Access(
            observe=access.names_list("observe", Access().observe),
            submit=access.names_list("submit", Access().submit),
            operate=access.names_list("operate", Access().operate),
            read=access.names_list("read", Access().read),
        ),
        stop_grace_s=lane.seconds("stop_grace_s", 90),
        crash_limit=lane.whole("crash_limit", 2),
        max_queued=lane.whole("max_queued", 1_000_000),
        disk_reserve_mib=lane.whole("disk_reserve_mib", 64),
        keep_days=keep_days,
        keep_payload_days=keep_payload_days,
        head_start_s={
            priority: head_start.number(priority, default)
            for priority, default in ((wire.Priority.LOW, -3600), (wire.Priority.NORMAL, 0), (wire.Priority.HIGH, 3600))
        },
    )
    for table in (lane, head_start, access):
        table.end()
    return config


def _route(name: str, table: "_Table") -> Route:
    if not _NAME.fullmatch(name):
        raise _Wrong(f"routes.{name} is no name for a route: letters, digits, '_', '.' and '-', 63 at most")
    kind = table.text("kind", "openai")
    if kind not in {"openai", "command"}:
        raise _Wrong(f"routes.{name}.kind is '{kind}', and must be 'openai' or 'command'")
    route = _openai(name, table) if kind == "openai" else _command(name, table)
    route = dataclasses.replace(
        route,
        may_run_twice=table.boolean("may_run_twice", False),
        max_attempts=table.whole("max_attempts", 3, highest=wire.MAX_ATTEMPTS),
        retry_first_s=table.seconds("retry_first_s", 2),
        retry_cap_s=table.seconds("retry_cap_s", 600),
        total_s=table.seconds("total_s", 1800),
        max_output_mib=table.whole("max_output_mib", 32, highest=MAX_OUTPUT_MIB),
    )
    table.end()
    return route


def _openai(name: str, table: "_Table") -> Route:
    ca_file = table.text("ca_file", "")
    proxy = table.text("proxy", "")
    return Route(
        name=name,
        base_url=_checked_url(f"routes.{name}.base_url", table.text("base_url")),
        model=table.text("model"),
        connect_s=table.seconds("connect_s", 10),
        first_byte_s=table.seconds("first_byte_s", 300),
        idle_s=table.seconds("idle_s", 120),
        api_key=_api_key(table),
        headers=_headers(table),
        ca_file=_ca_file(f"routes.{name}.ca_file", ca_file) if ca_file else None,
        proxy=Secret(_checked_url(f"routes.{name}.proxy", proxy, hidden=True)) if proxy else None,
    )


def _command(name: str, table: "_Table") -> Route:
    command = table.texts("command")
    if not command or not command[0]:
        raise _Wrong(f"routes.{name}.command is empty")
    if any("\0" in word for word in command):
        raise _Wrong(f"routes.{name}.command has a NUL, which no command line can carry")
    environment = _environment(table)
    return Route(
        name=name,
        base_url="",
        model=table.text("model", Path(command[0]).name),
        command=command,
        environment=environment,
        secret_environment=_secret_environment(table, environment),
        exit_statuses=_exit_statuses(table),
    )


def _environment(table: "_Table") -> dict[str, str]:
    given = table.table("environment")
    found = {name: given.text(name, "") for name in given.names()}
    for name, value in found.items():
        if not _VARIABLE.fullmatch(name):
            raise _Wrong(f"{given.path}: '{name}' is no name for a variable")
        if "\0" in value:
            raise _Wrong(f"{given.path}.{name} has a NUL, which no environment can carry")
    return found


def _secret_environment(table: "_Table", taken: Mapping[str, str]) -> dict[str, Secret]:
    given = table.table("secrets")
    found = {}
    for name in given.names():
        if not _VARIABLE.fullmatch(name):
            raise _Wrong(f"{given.path}: '{name}' is no name for a variable")
        if name in taken:
            raise _Wrong(f"{given.path}.{name} stands in {table.path}.environment too")
        found[name] = _credential(f"{given.path}.{name}", given.text(name))
    return found


def _exit_statuses(table: "_Table") -> dict[int, str]:
    given = table.table("exit_status")
    found = dict(EXIT_STATUSES)
    for name in given.names():
        meaning = given.text(name)
        if not re.fullmatch("[1-9][0-9]{0,2}", name) or int(name) > 255:
            raise _Wrong(f"{given.path}: '{name}' is no exit status from 1 to 255")
        if meaning not in {"retry", "fail", "error"}:
            raise _Wrong(f"{given.path}.{name} is '{meaning}', and must be 'retry', 'fail' or 'error'")
        found[int(name)] = meaning
    return found


def _ca_file(key: str, text: str) -> Path:
    try:
        ssl.create_default_context(cafile=text)
    except OSError as error:  # ssl.SSLError is one
        raise _Wrong(f"{key} is '{text}': {error.strerror or error}") from error
    return Path(text)


def _api_key(table: "_Table") -> Secret | None:
    name, file = table.text("api_key", ""), table.text("api_key_file", "")
    if name and file:
        raise _Wrong(f"{table.path}.api_key and {table.path}.api_key_file are both given")
    if file:
        path = Path(file)
        try:
            if path.stat().st_mode & 0o077:
                raise _Wrong(f"{table.path}.api_key_file is '{file}', which others may read: chmod 600 it")
        except OSError as error:
            raise _Wrong(f"{table.path}.api_key_file is '{file}': {error.strerror}") from error
        return _read_secret(f"{table.path}.api_key_file", path)
    return _credential(f"{table.path}.api_key", name) if name else None


def _credential(key: str, name: str) -> Secret:
    if not _NAME.fullmatch(name):
        raise _Wrong(f"{key} is not the name of a credential")
    # Somebody may have put the key itself where its name belongs, so it is not quoted.
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if directory is None:
        raise _Wrong(f"{key} names a credential, and there is no $CREDENTIALS_DIRECTORY to find it in")
    # LoadCredential= of a directory called "keys" shows its files as keys_NAME (systemd.exec(5)).
    for candidate in (Path(directory, name), Path(directory, f"keys_{name}")):
        if candidate.exists():
            return _read_secret(key, candidate)
    passed = sorted(path.name for path in Path(directory).iterdir()) if Path(directory).is_dir() else []
    raise _Wrong(f"{key} names a credential that was not passed; there are: {', '.join(passed) or 'none'}")


def _read_secret(key: str, path: Path) -> Secret:
    try:
        value = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _Wrong(f"{key}: cannot read '{path}'") from error
    if not value or not _HEADER_VALUE.fullmatch(value):
        raise _Wrong(f"{key}: '{path}' does not hold one line of printable ASCII")
    return Secret(value)


def _headers(table: "_Table") -> dict[str, Secret]:
    headers = table.table("headers")
    found = {}
    for name in headers.names():
        value = headers.text(name)
        if not _HEADER_NAME.fullmatch(name):
            raise _Wrong(f"{headers.path}: '{name}' is not the name of a header")
        if not _HEADER_VALUE.fullmatch(value):
            raise _Wrong(f"{headers.path}.{name} has characters that a header cannot carry")
        if name.lower() in {"content-length", "transfer-encoding", "host", "connection", "accept-encoding"}:
            raise _Wrong(f"{headers.path}.{name} is set by brainlane itself")
        found[name] = Secret(value)
    return found


def _checked_url(key: str, url: str, *, hidden: bool = False) -> str:
    shown = "given" if hidden or "@" in url else f"'{url.split('?')[0]}'"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # What cannot be read may be a password in the wrong place.
        why = "host and port cannot be told apart" if shown == "given" else error
        raise _Wrong(f"{key} is {shown}: {why}") from None
    if not _URL.fullmatch(url):
        raise _Wrong(f"{key} has characters that an address cannot have")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise _Wrong(f"{key} is {shown}, and must be an http:// or https:// address")
    if port == 0:
        raise _Wrong(f"{key} is {shown}: port 0 is no port")
    return url.rstrip("/")


class _Wrong(ValueError):
    """A key that cannot be used; the message begins with its name."""


class _Table:
    """A TOML table that remembers which of its keys were asked for, so that the others can be refused."""

    def __init__(self, path: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            shown = "given" if path.endswith(".headers") else f"{values!r:.60}"
            raise _Wrong(f"{path} is {shown}, and must be a table")
        self.path = path
        self._values = dict(values)

    def _key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def _take(self, name: str, default: Any, kind: str, *types: type) -> Any:
        if name not in self._values:
            if default is None:
                raise _Wrong(f"{self._key(name)} is missing")
            return default
        value = self._values.pop(name)
        # bool is an int to Python, and never what a number's key means.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            shown = "given" if _HIDDEN.search(self._key(name)) else repr(value)
            raise _Wrong(f"{self._key(name)} is {shown}, and must be {kind}")
        return value

    def names(self) -> list[str]:
        return list(self._values)

    def table(self, name: str) -> "_Table":
        return _Table(self._key(name), self._values.pop(name, {}))

    def text(self, name: str, default: str | None = None) -> str:
        value: str = self._take(name, default, "a text", str)
        if value == "" and default is None:
            raise _Wrong(f"{self._key(name)} is empty")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value: bool = self._take(name, default, "true or false", bool)
        return value

    def number(self, name: str, default: float) -> float:
        value: float = self._take(name, default, "a number", int, float)
        # A century of seconds is more than any of these can mean, and the arithmetic of dates stays far from its ends.
        if abs(value) > 3_200_000_000 or not math.isfinite(value):
            raise _Wrong(f"{self._key(name)} is {value!r}, which is out of range")
        return value

    def seconds(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise _Wrong(f"{self._key(name)} is {value!r}, and must be more than 0")
        return value

    def days(self, name: str, default: float) -> float:
        value = self.seconds(name, default)
        if value > 36_500:
            raise _Wrong(f"{self._key(name)} is {value!r}, and may be a century at the most")
        return value

    def whole(self, name: str, default: int, highest: int = 2**53) -> int:
        value: int = self._take(name, default, "a whole number", int)
        if not 0 < value <= highest:
            raise _Wrong(f"{self._key(name)} is {value!r}, and must be from 1 to {highest}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._take(name, None, "a list of texts", list)
        if not all(isinstance(item, str) for item in value):
            raise _Wrong(f"{self._key(name)} is {value!r:.60}, and must be a list of texts")
        return tuple(value)

    def names_list(self, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self._take(name, default, "a list of users and @groups", list, tuple)
        if not all(isinstance(item, str) and item.strip("@") for item in value):
            raise _Wrong(f"{self._key(name)} is {value!r}, and must be a list of users and @groups")
        return tuple(value)

    def end(self) -> None:
        if self._values:
            name = next(iter(self._values))
            raise _Wrong(f"{self._key(name)} is not a key of the configuration")


def _refusal(message: str) -> errors.StartRefused:
    return errors.StartRefused(wire.DaemonExit.CONFIGURATION, message, "man brainlaned.toml")
