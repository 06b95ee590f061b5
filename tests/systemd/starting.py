"""Start a lane, ask it at once, stop it, again and again: a script of its own inside a machine, so that it is quick.

`python3 starting.py TIMES` prints, as JSON, how long it took (s) and what each first answer was: its status, and the
lane's own word about which run it is; or the error of whoever was refused.
"""

import http.client
import json
import socket
import subprocess
import sys
import time

SOCKET = "/run/brainlane/control.sock"
UNITS = ("brainlaned.service", "brainlaned.socket")
ANSWER_S = 60.0


def asked() -> tuple[int, str]:
    """Ask a lane by a connection of our own; what may go wrong is for the caller."""
    connection = http.client.HTTPConnection("lane")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(ANSWER_S)
        connection.sock.connect(SOCKET)
        connection.request("GET", "/v1/status")
        response = connection.getresponse()
        return response.status, json.loads(response.read())["run"]
    finally:
        connection.close()


def first_answer() -> tuple[int, str]:
    subprocess.run(["systemctl", "start", UNITS[0]], check=True)
    try:
        return asked()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        # The socket too, so that nothing of this start is left for the next one.
        subprocess.run(["systemctl", "stop", *UNITS], check=True)
        # systemd would take so many starts of one socket for a loop.
        subprocess.run(["systemctl", "reset-failed", *UNITS], check=True)


def main() -> None:
    began = time.monotonic()
    answers = [first_answer() for _ in range(int(sys.argv[1]))]
    print(json.dumps({"took_s": time.monotonic() - began, "answers": answers}))


if __name__ == "__main__":
    main()
