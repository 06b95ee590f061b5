"""brainlaned on the command line: arguments → configuration → daemon.run → exit status.

Owns no logic of its own. Under systemd everything comes from the unit's environment (STATE_DIRECTORY,
CONFIGURATION_DIRECTORY); without it, root uses the system's places and anybody else those of the XDG directories.
"""

import contextlib
import faulthandler
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from . import errors, events, systemd, wire
from .turnaway import turn_away
from .wire import DaemonExit

CONFIGURATION_NAME = "brainlaned.toml"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def brainlaned(
    configuration: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", readable=False, help="Read this configuration file.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", metavar="DIR", readable=False, help="Keep database and spool here.")
    ] = None,
    socket: Annotated[Path | None, typer.Option("--socket", metavar="PATH", help="Listen here.")] = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Read the configuration, try each route without a prompt, and exit.")
    ] = False,
    lane: Annotated[
        str | None, typer.Option("--lane", metavar="NAME", help="Be the lane that `brainctl --lane NAME` means.")
    ] = None,
    record_stop: Annotated[
        bool, typer.Option("--record-stop", help="For ExecStopPost=: write down how the last run ended, and exit.")
    ] = False,
    verify_state: Annotated[
        bool, typer.Option("--verify", help="Check the database and the spool of a stopped lane, and exit.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Run a lane in the foreground: accept jobs for a brain, and ask it one call at a time."""
    if version:
        typer.echo(wire.VERSION)
        return
    if lane is not None and not re.fullmatch(wire.LANE_PATTERN, lane):
        raise typer.BadParameter(f"'{lane}' is no name for a lane", param_hint="--lane")
    faulthandler.enable()
    os.umask(0o077)
    events.start()
    try:
        if record_stop:
            # Where it cannot be written, the start has said so already.
            with contextlib.suppress(OSError):
                systemd.record_stop(state_dir or _state_dir(lane), os.environ, wire.format_time(datetime.now(UTC)))
            status = DaemonExit.OK
        else:
            # Here, because whoever only leaves a note of a stop is waited for by the next start.
            from . import check, config, daemon

            directory = state_dir or _state_dir(lane)
            if verify_state:
                status = daemon.verify_stopped(directory)
            else:
                found = config.load(configuration or _configuration(lane))
                place = daemon.Place(directory, socket or _socket(lane), lane)
                status = check.run(found) if check_config else daemon.run(found, place)
    except errors.StartRefused as refusal:
        events.start_refused(str(refusal), refusal.next_action)
        # Whoever waits at a socket that systemd keeps open would only start us again.
        waiting = systemd.passed_listener()
        if waiting is not None:
            turn_away(waiting, refusal)
        status = refusal.status
    except OSError as error:
        events.start_refused(f"cannot run: {error}", "brainlaned --help")
        status = DaemonExit.PERMISSION if isinstance(error, PermissionError) else DaemonExit.FAILURE
    finally:
        events.stop()
    raise typer.Exit(status)


def _state_dir(lane: str | None) -> Path:
    given = os.environ.get("STATE_DIRECTORY")
    if given:
        return Path(given.split(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib", _named("brainlane", lane))
    from platformdirs import user_state_path

    return user_state_path(_named("brainlane", lane))


def _socket(lane: str | None) -> Path:
    passed = systemd.passed_listener()
    if passed is not None:
        with passed:
            return Path(os.fsdecode(passed.getsockname()))
    return wire.system_socket(lane) if os.geteuid() == 0 else wire.user_socket(lane)


def _named(name: str, lane: str | None) -> str:
    return f"{name}-{lane}" if lane else name


def _configuration(lane: str | None) -> Path | None:
    name = f"{lane}.toml" if lane else CONFIGURATION_NAME
    given = os.environ.get("CONFIGURATION_DIRECTORY")
    if given:
        path = Path(given.split(":")[0], name)
    elif os.geteuid() == 0:
        path = Path("/etc/brainlane", name)
    else:
        from platformdirs import user_config_path

        path = user_config_path("brainlane") / name
    # A lane with a name is another one than the default, so it says what it is.
    return path if lane or path.exists() else None


def main() -> None:
    """Run brainlaned; usage errors exit with 64, as sysexits.h has it."""
    try:
        # Without standalone mode a typer.Exit comes back as the value of the call.
        sys.exit(app(standalone_mode=False))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:
        show = getattr(error, "format_message", None)
        if show is None:
            raise
        print(f"brainlaned: cannot understand the command line: {show()}", file=sys.stderr)
        sys.exit(DaemonExit.USAGE)


if __name__ == "__main__":
    main()
