"""What stands before the verb: which lane is meant, whether the answer is for a program, how long it may take."""

import re
from dataclasses import dataclass, field

from brainlaned.wire import find_socket

from .client import ANSWER_WITHIN_S, Lane
from .errors import usage

LANE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(slots=True)
class Session:
    """One run of brainctl."""

    words: list[str]
    """The command line after the program's name."""
    verb: str | None = None
    json: bool = False
    socket: str | None = None
    name: str | None = None
    answer_within_s: float = ANSWER_WITHIN_S
    prefix: list[str] = field(default_factory=list)
    """The options that name the lane, as they were given: a command to paste has to meet the same one."""

    @property
    def help(self) -> str:
        """Return the command that explains the command line."""
        return f"brainctl {self.verb} --help" if self.verb else "brainctl --help"

    def lane(self) -> Lane:
        """Return the lane that is meant."""
        if self.name is not None and not LANE_NAME.fullmatch(self.name):
            usage(f"cannot use --lane '{self.name}': a lane's name is letters, digits, _ . and -")
        path = self.socket if self.socket is not None else str(find_socket(self.name))
        return Lane(path, self.answer_within_s)

    def here(self, command: str) -> str:
        """Return a command to paste so that it meets the lane that this run met."""
        program, _, rest = command.partition(" ")
        if program != "brainctl" or not self.prefix or rest.startswith(("--lane ", "--socket ")):
            return command
        from shlex import join

        return f"brainctl {join(self.prefix)} {rest}"
