"""The call that every peer makes from its jobs, of which a spooler of commands makes a process: `call.py URL PROMPT`.

Nothing but the standard library, and little of that: starting it is part of what such a spooler takes for a job.
"""

import http.client
import json
import sys


def call(url: str, prompt: str) -> str:
    """Ask the brain as the lane does (streaming), by the quickest client of the standard library, and read it all."""
    address, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(address, timeout=120)
    body = {"model": "test-model", "stream": True, "messages": [{"role": "user", "content": prompt}]}
    connection.request("POST", f"/{path}/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse().read().decode()
    connection.close()
    return answer


if __name__ == "__main__":
    call(*sys.argv[-2:])
