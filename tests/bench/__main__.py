"""Measure, print one table, write JSON, and judge ratios."""

import argparse
import compileall
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.bench import command, contest, control, gap, machine, memory, rows, serial, table
from tests.bench.results import Results
from tests.bench.stand import Bench, brain_process

ROOT = Path(__file__).resolve().parents[2]
FULL_JOBS, QUICK_JOBS = 100_000, 20_000
FULL_ROWS, QUICK_ROWS = 1_000_000, 100_000


def limits(bench: Bench) -> None:
    """Measure what the machine itself can do."""
    bench.results.machine = machine.description(bench.directory)
    bench.note(
        syncs_per_s=machine.syncs_per_s(bench.directory),
        commits_per_s=machine.commits_per_s(bench.directory),
        python_mib=machine.python_mib(),
    )


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "limits": limits,
    "gap": gap.lane,
    "peers": contest.peers,
    "submits": control.submits,
    "slow": control.submits_to_a_slow_disk,
    "beside": control.submits_beside_a_call,
    "rest": control.rest,
    "command": command.brainctl,
    "rows": rows.large_table,
    "memory": memory.many_jobs,
    "answer": memory.long_answer,
    "serial": serial.local_model,
}


def run(options: argparse.Namespace) -> Results:
    """Measure the sections that were asked for, one after the other."""
    results = Results()
    # As they are when they are installed; a checkout may never have been.
    for package in ("brainlaned", "brainctl"):
        compileall.compile_dir(ROOT / package, quiet=1)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as directory, brain_process() as brain:
        bench = Bench(
            directory=Path(directory),
            brain=brain,
            results=results,
            rows=options.rows or (QUICK_ROWS if options.quick else FULL_ROWS),
            jobs=QUICK_JOBS if options.quick else FULL_JOBS,
            peers_python=options.peers_python,
        )
        for name in options.only or SECTIONS:
            since = time.monotonic()
            print(f"{name}:", flush=True)
            try:
                SECTIONS[name](bench)
            except Exception as error:
                # What the other sections found took minutes.
                results.broken.append(f"{name}: {type(error).__name__}: {error}")
                traceback.print_exc()
            print(f"  ({time.monotonic() - since:.0f} s)", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure the lane beside its peers.")
    parser.add_argument("--json", type=Path, default=Path("dist/bench.json"), metavar="FILE", help="what was found")
    parser.add_argument("--rows", type=int, default=int(os.environ.get("ROWS") or 0), help="of the large table")
    parser.add_argument("--quick", action="store_true", help="fewer rows and jobs")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--directory", type=Path, help="where to work; its disk is what is measured")
    parser.add_argument(
        "--peers-python", default=sys.executable, metavar="PROGRAM", help="an interpreter that has the peers"
    )
    parser.add_argument("--check", type=Path, nargs="?", const=True, metavar="FILE", help="judge FILE, or this run")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="write the table of --json into FILE, and end")
    options = parser.parse_args()
    if options.readme is not None:
        table.write_into(options.readme, Results.load(options.json))
        return 0
    if options.check is not None and options.check is not True:
        results = Results.load(options.check)
    else:
        results = run(options)
        results.save(options.json)
        print()
        print(table.text(results))
    if options.check is None:
        return 1 if results.broken else 0
    faults = table.faults(results)
    print("\n".join(faults or ["every ratio is within its limit"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
