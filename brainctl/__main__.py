"""brainctl: run the command line, and turn whatever ends it into an exit status and one line. Never a traceback."""

import contextlib
import gc
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from .errors import Problem
    from .session import Session

BEFORE_THE_VERB = ("--socket", "--lane", "--json", "--answer-within", "--version")


def main() -> int:
    """Run brainctl with the arguments of the process and return its exit status."""
    # Collecting cycles, among the imports and once more at the end, is a sixth of the life of a short command.
    gc.disable()
    # Closed by whoever started us; nobody reads it, and a write must not fail for that.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
    # A terminal that cannot show a character gets its escape instead.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        return _run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("brainctl: interrupted\n")
        return 130
    finally:
        gc.freeze()


def _run(words: list[str]) -> int:
    from . import cli, errors, out
    from .session import Session

    session = Session(words)
    try:
        result = cli.application(words, complete="_BRAINCTL_COMPLETE" in os.environ)(words, obj=session)
    except errors.Problem as problem:
        return _tell(session, problem)
    except errors.Interrupted as stopped:
        errors.say(f"{stopped.message}; next: {session.here(stopped.next_action)}")
        return errors.INTERRUPTED
    except out.ReaderGone:
        _die_of_sigpipe()
    except SystemExit as end:
        if end.code == 1:
            # What Typer makes of a reader who went away while it wrote its help.
            _die_of_sigpipe()
        raise
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        return _tell(session, _problem_of(session, error))
    if result == errors.INTERRUPTED:
        # Typer makes this of a Ctrl-C that no command took for itself.
        errors.say("interrupted")
    return int(result or 0)


def _tell(session: "Session", problem: "Problem") -> int:
    from brainlaned.wire import ErrorKind

    from . import errors, out

    if problem.kind == ErrorKind.USAGE and problem.next_action is None:
        problem.next_action = session.help
    elif problem.next_action is not None:
        problem.next_action = session.here(problem.next_action)
    if session.json:
        own = json.dumps(problem.error_object(), ensure_ascii=False).encode(errors="backslashreplace")
        # Standard output may be what is broken, and that is about to be told.
        with contextlib.suppress(errors.Problem):
            out.document(problem.body or own)
    errors.say(problem.line)
    return problem.exit_status


def _problem_of(session: "Session", error: Exception) -> "Problem":
    from brainlaned.wire import ErrorKind

    from .errors import Problem

    # A mistake on the command line. Typer raises it from one of two packages, by its version; both have this method.
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        where = "python -X dev -m brainctl ... shows where"
        return Problem(ErrorKind.INTERNAL, f"cannot go on: {type(error).__name__}: {error}", where)
    message = str(format_message()).strip().rstrip(".")
    if getattr(error, "option_name", None) in BEFORE_THE_VERB and session.verb:
        message += " here: it stands before the verb"
    verb = session.verb or "run brainctl"
    return Problem(ErrorKind.USAGE, f"cannot {verb}: {message[:1].lower()}{message[1:]}")


def _die_of_sigpipe() -> NoReturn:
    """End as a process ends whose reader has gone, so that a shell sees what it expects."""
    # What is still buffered must not be tried again when the interpreter closes the stream.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    raise SystemExit(128 + signal.SIGPIPE)  # where the signal is blocked


if __name__ == "__main__":
    sys.exit(main())
