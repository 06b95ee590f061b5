"""`brainlaned --check-config`: is what the configuration says true? It asks for lists of models and sends no prompt.

Reading the configuration has already refused whatever is wrong in itself. Here each route is tried: an endpoint is
asked which models it has, a command is looked for. A server without such a list is no fault; the model then shows at
the first job.
"""

import shutil
from collections.abc import Iterator

from . import config
from .brains.command import environment_of
from .brains.http import HttpBrain
from .wire import DaemonExit

_SHOWN_MODELS = 5


def check(configuration: config.Config) -> Iterator[tuple[bool, str]]:
    """Yield for each route whether all is well, and one line about it."""
    for name, route in configuration.routes.items():
        is_well, finding = _command(route) if route.command else _endpoint(route)
        yield is_well, f"route {name}: {'ok' if is_well else 'WRONG'}: {route.endpoint}: {finding}"


def run(configuration: config.Config) -> DaemonExit:
    """Print a line for each route. Return OK when all is well, else FAILURE."""
    found = []
    for is_well, line in check(configuration):
        print(line, flush=True)
        found.append(is_well)
    return DaemonExit.OK if all(found) else DaemonExit.FAILURE


def _command(route: config.Route) -> tuple[bool, str]:
    path = environment_of(route)["PATH"]
    program = shutil.which(route.command[0], path=path)
    return (True, f"it is {program}") if program else (False, f"no such program can be run (PATH is {path})")


def _endpoint(route: config.Route) -> tuple[bool, str]:
    brain = HttpBrain(route)
    try:
        status, models = brain.models()
    except OSError as error:
        return False, str(error)
    finally:
        brain.close()
    if status in {401, 403}:
        return False, f"it refuses the key (HTTP {status})" if route.api_key else f"it wants a key (HTTP {status})"
    if 300 <= status < 400:
        return False, f"it redirects (HTTP {status}), so base_url is not its address"
    if status in {404, 405, 501}:
        return True, f"it answers (HTTP {status}), and has no list of models to look '{route.model}' up in"
    if status != 200 or models is None:
        return False, f"its list of models cannot be read (HTTP {status})"
    # Ollama lists a model by its full name, and knows it without the tag.
    if route.model in models or f"{route.model}:latest" in models:
        return True, f"it has model '{route.model}'"
    shown = ", ".join(models[:_SHOWN_MODELS]) + (", ..." if len(models) > _SHOWN_MODELS else "")
    return False, f"it does not list model '{route.model}'; it lists {shown or 'none'}"
