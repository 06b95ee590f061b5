"""Make the database that every later release must open: `python -m tests.contract.make_database VERSION`.

Run once for a release whose schema is new, never again for an older one: what it made is the contract. A real lane
makes it, with jobs of every status that lasts, decisions about them, and a pause.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from tests import brainserver
from tests.brainserver import BrainServer
from tests.lane import config_for, running_lane

HERE = Path(__file__).parent


def make(target: Path) -> None:
    """Write a database of the present schema."""
    with tempfile.TemporaryDirectory() as directory, BrainServer() as server:
        place = Path(directory)
        with running_lane(place, config_for(server.base_url)) as lane:
            done = lane.wait(lane.submit("a question", key="first", labels={"batch": "one"}, priority="high")["id"])
            server.script(brainserver.status(400))
            lane.wait(lane.submit("a bad question")["id"])
            held = []
            for prompt in ("cut", "accepted", "completed"):
                server.script(brainserver.cut(400))
                held.append(lane.wait(lane.submit(prompt, labels={"batch": "two"})["id"])["id"])
            lane.post(f"/v1/jobs/{held[1]}/recover", {"action": "accept", "reason": "it will do"})
            lane.post(f"/v1/jobs/{held[2]}/recover", {"action": "complete", "text": "by hand"})
            lane.post("/v1/lane/pause", {"reason": "made for ever"})
            lane.submit("not yet", not_before="2027-01-01T00:00:00Z")
            lane.submit("queued", request={"model": "another", "temperature": 0.5}, max_attempts=7)
            lane.post(f"/v1/jobs/{lane.submit('unwanted')['id']}/cancel", {"reason": "changed my mind"})
            assert done["status"] == "done"
        shutil.copy(lane.database, target)


if __name__ == "__main__":
    make(HERE / f"release-{sys.argv[1]}.db")
