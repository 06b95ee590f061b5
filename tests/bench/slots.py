"""The bundled model behind several slots: `python -m tests.bench.slots N [options of brainlaned.localbrain]`.

The server is the one that comes with brainlane, which has one slot; only that number is changed.
"""

import sys
from typing import Any

from brainlaned import localbrain


def main() -> int:
    """Serve until SIGTERM."""
    import xllamacpp

    slots = int(sys.argv.pop(1))
    original = xllamacpp.Server

    def server(params: Any) -> Any:
        params.n_parallel = slots
        return original(params)

    xllamacpp.Server = server
    return localbrain.main()


if __name__ == "__main__":
    sys.exit(main())
