"""What was found, as a table for a terminal and for the README, and the judgement of the ratios."""

from pathlib import Path

from tests.bench.contest import OURS
from tests.bench.figures import RATIOS
from tests.bench.results import Peer, Results

BEGIN = "<!-- bench:begin -->"
END = "<!-- bench:end -->"

LINES: tuple[tuple[str, str, str], ...] = (
    ("Gap between two calls, p50", "gap_ms", "{:.1f} ms"),
    ("Submit to request at an idle lane, p50", "start_ms", "{:.1f} ms"),
    ("Submits, 1 client", "submit_1_per_s", "{:,.0f}/s"),
    ("Submits, 16 clients", "submit_16_per_s", "{:,.0f}/s"),
    ("What 16 clients can do", "clients_16_per_s", "{:,.0f}/s"),
    ("Bare SQLite commits, one row each", "commits_per_s", "{:,.0f}/s"),
    ("Bare syncs (fdatasync)", "syncs_per_s", "{:,.0f}/s"),
    ("Submits, 16 clients, a disk that takes 2.5 ms to sync", "slow_submit_16_per_s", "{:,.0f}/s"),
    ("Syncs of that disk", "slow_syncs_per_s", "{:,.0f}/s"),
    ("Submit without a call, p99", "alone_p99_ms", "{:.1f} ms"),
    ("Submit beside a call, p99", "beside_p99_ms", "{:.1f} ms"),
    ("Claim, 1,000 jobs", "claim_ms_few", "{:.2f} ms"),
    ("Claim, {rows:,.0f} jobs", "claim_ms_many", "{:.2f} ms"),
    ("Status, 1,000 jobs", "status_ms_few", "{:.2f} ms"),
    ("Status, {rows:,.0f} jobs", "status_ms_many", "{:.2f} ms"),
    ("List of 50, 1,000 jobs", "list_ms_few", "{:.2f} ms"),
    ("List of 50, {rows:,.0f} jobs", "list_ms_many", "{:.2f} ms"),
    ("Show, 1,000 jobs", "show_ms_few", "{:.2f} ms"),
    ("Show, {rows:,.0f} jobs", "show_ms_many", "{:.2f} ms"),
    ("Start, 1,000 jobs", "boot_s_few", "{:.2f} s"),
    ("Start, {rows:,.0f} jobs", "boot_s_many", "{:.2f} s"),
    ("An empty Python, from start to end", "python_ms", "{:.0f} ms"),
    ("brainctl submit, from start to end", "brainctl_submit_ms", "{:.0f} ms"),
    ("Completing a command of brainctl", "brainctl_complete_ms", "{:.0f} ms"),
    ("Completing a job's id", "brainctl_complete_id_ms", "{:.0f} ms"),
    ("Processor at rest, of one core", "rest_cpu_percent", "{:.2f} %"),
    ("Wake-ups at rest", "rest_wake_ups_per_s", "{:.2f}/s"),
    ("Memory at rest", "rest_mib", "{:.0f} MiB"),
    ("Memory, freshly started", "fresh_mib", "{:.0f} MiB"),
    ("Memory, after {jobs:,.0f} jobs", "after_jobs_mib", "{:.0f} MiB"),
    ("Growth while an answer of {answer_mib:.0f} MiB comes", "answer_growth_mib", "{:.0f} MiB"),
)
SERIAL = (
    ("through the lane, one at a time", "lane"),
    ("at once, two slots", "slots_2"),
    ("all at once, four slots", "slots_4"),
)
Rows = list[list[str]]


def _figures(results: Results) -> Rows:
    found = results.figures
    return [
        [words.format(**found), form.format(found[name])]
        for words, name, form in LINES
        if name in found and ("{" not in words or {"rows", "jobs", "answer_mib"} & found.keys())
    ]


def _ratios(results: Results) -> Rows:
    rows = []
    for ratio in RATIOS:
        value = ratio.value(results)
        if value is not None:
            limit = f"{'at least' if ratio.at_least else 'at most'} {ratio.limit:g}"
            if ratio.goal is not None:
                limit += f" (wanted: {ratio.goal:g})"
            rows.append([ratio.words, f"{value:.2f}", limit, "" if ratio.is_kept(value) else "NOT KEPT"])
    return rows


def _peers(results: Results) -> Rows:
    peers = dict(results.peers)
    if OURS in peers:
        found = results.figures
        commits = found.get("gap_commits_per_s")
        ours = Peer(
            enqueue_per_s=found.get("submit_1_per_s"),
            gap_ms=found.get("gap_ms"),
            commit_ms=1000 / commits if commits else None,
            synced=found["slow_submit_1_per_s"] < found["slow_syncs_per_s"] if "slow_submit_1_per_s" in found else None,
            start_ms=found.get("start_ms"),
            after_kill=peers.pop(OURS).after_kill,
        )
        peers = {f"{OURS} (over its socket)": ours, **peers}
    return [
        [
            name,
            _number(peer.enqueue_per_s, 0),
            _number(peer.gap_ms, 1),
            _number(peer.commit_ms, 2),
            {True: "yes", False: "no", None: ""}[peer.synced],
            _number(peer.start_ms, 1),
            peer.after_kill or "",
        ]
        for name, peer in peers.items()
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _serial(results: Results) -> Rows:
    found = results.figures
    return [
        [words, *(f"{found[f'{name}_{part}_s']:.1f} s" for part in ("first", "mean", "end"))]
        for words, name in SERIAL
        if f"{name}_end_s" in found
    ]


PARTS = (
    (("what", "measured"), _figures),
    (
        (
            "peer",
            "stored a second",
            "gap, ms",
            "a commit then, ms",
            "synced",
            "start, ms",
            "after SIGKILL in the middle of a job",
        ),
        _peers,
    ),
    (("a burst of four on the bundled model", "first answer", "mean", "last answer"), _serial),
)
JUDGED = ("ratio", "here", "limit", "")


def machine(results: Results) -> str:
    """Say in one sentence what the figures were measured on."""
    found = results.machine
    if not found:
        return ""
    sync = f"a sync takes {1000 / results.figures['syncs_per_s']:.2f} ms" if "syncs_per_s" in results.figures else ""
    words = "{processor}, {cores} cores, Linux {kernel}, Python {python}, SQLite {sqlite}, {file_system}"
    return ", ".join(part for part in (words.format(**found), sync) if part)


def text(results: Results) -> str:
    """Return everything for a terminal."""
    parts = [machine(results)]
    for head, rows_of in (*PARTS, (JUDGED, _ratios)):
        rows = rows_of(results)
        if rows:
            parts.append(_aligned([list(head), *rows]))
    parts += [f"skipped: {why}" for why in results.skipped]
    parts += [f"BROKEN: {why}" for why in results.broken]
    return "\n\n".join(part for part in parts if part)


def _aligned(rows: Rows) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def markdown(results: Results) -> str:
    """Return the tables for the README."""
    parts = [f"Measured in one run of `make bench` on {machine(results)}; read the ratios."]
    for head, rows_of in PARTS:
        rows = rows_of(results)
        if rows:
            parts.append("\n".join(_bars(row) for row in (list(head), ["---"] * len(head), *rows)))
    return "\n\n".join(parts)


def _bars(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def faults(results: Results) -> list[str]:
    """Return one line for each ratio beyond its limit and each broken section; what was skipped is no fault."""
    beyond = [f"{words}: {value}, limit {limit}" for words, value, limit, verdict in _ratios(results) if verdict]
    return [*beyond, *(f"broken: {why}" for why in results.broken)]


def write_into(path: Path, results: Results) -> None:
    """Replace what stands between the two marks of a file. Raises ValueError, changing nothing, without them."""
    path.write_text(between_the_marks(path.read_text(encoding="utf-8"), markdown(results)), encoding="utf-8")


def between_the_marks(document: str, content: str) -> str:
    """Return the document with `content` between the marks, which must stand there once each, in their order."""
    if document.count(BEGIN) != 1 or document.count(END) != 1 or document.index(BEGIN) > document.index(END):
        raise ValueError(f"cannot find '{BEGIN}' and then '{END}', once each")
    before, _, rest = document.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"
