"""What stands before the verb: which lane is meant, whether the answer is for a program, how long it may take."""

import re
from dataclasses import dataclass, field

from brainlaned.wire import LANE_PATTERN, find_socket

from .client import ANSWER_WITHIN_S, Lane
from .errors import usage

BARE_COMMAND = re.compile(r"(?:^|, or |, then )brainctl (?!(?:-\S+ (?:[^-]\S* )?)*?--(?:lane|socket)[ =])")
"""A command to paste that does not say which lane it is for."""


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

    def choose(self, socket: str | None, lane: str | None, *, by_hand: bool) -> None:
        """Take the options that name the lane; `by_hand`: the socket stands on the command line itself."""
        if by_hand and lane is not None:
            usage("cannot use --socket together with --lane: they name two lanes")
        # A lane that is named now outranks a socket that the environment names for every command.
        self.socket, self.name = (None if lane is not None else socket), lane
        self.prefix = ["--lane", lane] if lane is not None else ["--socket", socket or ""] if by_hand else []

    def lane(self) -> Lane:
        """Return the lane that is meant."""
        if self.name is not None and not re.fullmatch(LANE_PATTERN, self.name):
            usage(f"cannot use --lane '{self.name}': a lane's name is letters, digits, _ . and -")
        path = self.socket if self.socket is not None else str(find_socket(self.name))
        return Lane(path, self.answer_within_s)

    def here(self, command: str) -> str:
        """Return a command to paste so that it meets the lane that this run met."""
        if not self.prefix:
            return command
        from shlex import join

        # A hint may name a second command; it has to meet the same lane.
        return re.sub(BARE_COMMAND, lambda found: f"{found[0]}{join(self.prefix)} ", command)
