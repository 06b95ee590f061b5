"""brainlaned on the command line: arguments → configuration → daemon.run → exit status.

Owns no logic of its own. Under systemd everything comes from the unit's environment (STATE_DIRECTORY,
CONFIGURATION_DIRECTORY); without it, root uses the system's places and anybody else those of the XDG directories.
"""

import faulthandler
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import check, config, daemon, errors, events, wire
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
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Run a lane in the foreground: accept jobs for a brain, and ask it one call at a time."""
    if version:
        typer.echo(wire.VERSION)
        return
    faulthandler.enable()
    os.umask(0o077)
    listener = events.start()
    try:
        found = config.load(configuration or _configuration())
        if check_config:
            status = check.run(found)
        else:
            status = daemon.run(found, daemon.Place(state_dir or _state_dir(), socket or _socket()))
    except errors.StartRefused as refusal:
        events.start_refused(str(refusal), refusal.next_action)
        status = refusal.status
    except OSError as error:
        events.start_refused(f"cannot run: {error}", "brainlaned --help")
        status = DaemonExit.PERMISSION if isinstance(error, PermissionError) else DaemonExit.FAILURE
    finally:
        listener.stop()
    raise typer.Exit(status)


def _state_dir() -> Path:
    given = os.environ.get("STATE_DIRECTORY")
    if given:
        return Path(given.split(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/brainlane")
    from platformdirs import user_state_path

    return user_state_path("brainlane")


def _socket() -> Path:
    return wire.system_socket() if os.geteuid() == 0 else wire.user_socket()


def _configuration() -> Path | None:
    given = os.environ.get("CONFIGURATION_DIRECTORY")
    if given:
        path = Path(given.split(":")[0], CONFIGURATION_NAME)
    elif os.geteuid() == 0:
        path = Path("/etc/brainlane", CONFIGURATION_NAME)
    else:
        from platformdirs import user_config_path

        path = user_config_path("brainlane") / CONFIGURATION_NAME
    return path if path.exists() else None


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
