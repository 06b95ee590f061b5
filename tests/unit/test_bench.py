"""What the benchmark and the soak make of their figures: percentiles, ratios, verdicts, tables, and the README."""

from pathlib import Path

import pytest

from tests import soak
from tests.bench import contest, figures, gap, table
from tests.bench.results import Latencies, Peer, Results
from tests.bench.stand import Seen

GOOD = {
    "gap_ms": 4.0,
    "gap_commits_per_s": 9000.0,
    "slow_submit_16_per_s": 1600.0,
    "slow_syncs_per_s": 400.0,
    "claim_ms_few": 0.1,
    "claim_ms_many": 0.11,
    "rows": 1e6,
    "syncs_per_s": 8000.0,
}
MACHINE = {"processor": "P", "cores": "2", "kernel": "6", "python": "3", "sqlite": "3", "file_system": "ext4"}


def results(**changed: float) -> Results:
    peers = {"huey": Peer(gap_ms=5.0, after_kill="lost, never again"), "nq": Peer(gap_ms=1.0, is_python_worker=False)}
    return Results(dict(MACHINE), {**GOOD, **changed}, peers, ["rq: there is no redis-server"])


def seen(*moments: tuple[float, float]) -> list[Seen]:
    return [Seen("job", received, ended) for received, ended in moments]


def test_a_percentile_is_a_value_that_was_measured() -> None:
    measured = Latencies(number / 1000 for number in range(1, 101))
    assert measured.p99_ms == pytest.approx(99)
    assert measured.p50_ms == pytest.approx(50.5)
    assert Latencies([0.002]).p99_ms == pytest.approx(2)


def test_the_quietest_third_is_taken_in_the_order_of_time() -> None:
    quietest = Latencies([9, 9, 9, 1, 2, 3, 1, 9, 9, 9]).quietest_third()
    assert (len(quietest), quietest.p50_ms) == (3, 2000)
    assert len(Latencies([1]).quietest_third()) == 1


def test_a_gap_is_between_the_end_of_an_answer_and_the_next_request() -> None:
    gaps = gap.of(seen((0.0, 1.0), (1.25, 2.0), (2.25, 3.0)))
    assert gaps.p50_ms == pytest.approx(250)


def test_gaps_are_found_whatever_the_order_in_which_requests_are_told() -> None:
    assert gap.of(seen((2.5, 3.0), (0.0, 2.0))).p50_ms == pytest.approx(500)


def test_ratios_within_their_limits_are_no_faults() -> None:
    assert table.faults(results()) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"slow_submit_16_per_s": 860.0}, "syncs of a slow disk: 2.15, limit at least 2.2 (wanted: 3)"),
        ({"claim_ms_many": 0.16}, "claim, very many rows / few: 1.60, limit at most 1.5"),
    ],
)
def test_a_ratio_beyond_its_limit_is_named_with_both(changed: dict[str, float], words: str) -> None:
    (fault,) = table.faults(results(**changed))
    assert fault.endswith(words)


def test_a_section_that_broke_is_a_fault_and_one_that_was_skipped_is_none() -> None:
    broken = results()
    broken.broken.append("rows: KeyError: 'few'")
    assert table.faults(broken) == ["broken: rows: KeyError: 'few'"]
    assert "BROKEN: rows" in table.text(broken)


def test_only_python_workers_that_sync_are_what_the_gap_is_held_against() -> None:
    measured = results()
    measured.peers["litequeue"] = Peer(gap_ms=0.5, synced=False)
    assert figures.quickest_python_worker(measured) == (5.0, "huey")


def test_what_was_not_measured_is_neither_kept_nor_broken() -> None:
    assert table.faults(Results()) == []
    assert all(ratio.value(Results()) is None for ratio in figures.RATIOS)


def test_no_ratio_asks_for_a_figure_that_is_named_otherwise_in_the_table() -> None:
    everything = Results(dict(MACHINE), {name: 1.0 for _, name, _ in table.LINES}, {"huey": Peer(gap_ms=1.0)})
    everything.figures |= {"rows": 1, "jobs": 1, "answer_mib": 1, "python_mib": 1, "rest_sign_of_life_s": 1}
    everything.figures |= {f"{name}_commits_per_s": 1.0 for name in ("gap", "start", "submit")}
    everything.figures |= {
        f"list_of_{what}_ms_{size}": 1.0 for what in ("status", "nothing") for size in ("few", "many")
    }
    assert [ratio.words for ratio in figures.RATIOS if ratio.value(everything) is None] == []


@pytest.mark.parametrize(
    ("requests", "left", "fate"),
    [
        (1, 0, "lost, never again"),
        (1, 1, f"stuck for over {contest.PATIENCE_S:g} s"),
        (2, 0, "run again, silently"),
        (2, 1, "run again, silently"),
    ],
)
def test_what_became_of_a_killed_job_follows_from_what_the_brain_saw(requests: int, left: int, fate: str) -> None:
    assert contest.judge(requests, left) == fate


def test_the_table_holds_figures_peers_ratios_and_what_was_skipped() -> None:
    shown = table.text(results())
    assert "P, 2 cores, Linux 6, Python 3, SQLite 3, ext4, a sync takes 0.12 ms" in shown
    assert "Claim, 1,000,000 jobs" in shown and "0.11 ms" in shown
    assert "huey" in shown and "lost, never again" in shown
    assert "skipped: rq: there is no redis-server" in shown
    assert "NOT KEPT" not in shown and "NOT KEPT" in table.text(results(gap_ms=9.0))


def test_a_row_of_the_markdown_table_has_as_many_cells_as_its_head() -> None:
    rows = [line for line in table.markdown(results()).splitlines() if line.startswith("|")]
    blocks = "\n".join(table.markdown(results()).splitlines()).split("\n\n")
    assert rows
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines() if line.startswith("|")}) <= 1


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    results().save(tmp_path / "dist" / "bench.json")
    assert Results.load(tmp_path / "dist" / "bench.json") == results()


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n", encoding="utf-8")
    table.write_into(readme, results())
    table.write_into(readme, results())
    written = readme.read_text(encoding="utf-8")
    assert written.startswith(f"before\n{table.BEGIN}\n\nMeasured in one run")
    assert written.endswith(f"\n\n{table.END}\nafter\n")
    assert "old" not in written and written.count(table.BEGIN) == 1


@pytest.mark.parametrize(
    "document", ["nothing", table.BEGIN, f"{table.END} {table.BEGIN}", f"{table.BEGIN * 2}{table.END}"]
)
def test_a_document_without_the_two_marks_is_left_alone(document: str, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(document, encoding="utf-8")
    with pytest.raises(ValueError, match="once each"):
        table.write_into(readme, results())
    assert readme.read_text(encoding="utf-8") == document


def samples(*memory: float) -> list[dict[str, float]]:
    return [{"memory_mib": each, "descriptors": 10, "log_mib": 4, "spool_files": 1} for each in memory]


def test_what_is_used_while_loading_is_no_growth() -> None:
    assert soak.growths(samples(10, 20, 50, 50, 50, 51, 50, 50)) == []


def test_growth_within_one_life_is_named() -> None:
    (fault,) = soak.growths(samples(50, 50, 50, 50, 60, 60, 70, 70))
    assert fault == "memory_mib grew from 50.0 to 70.0 within one life"


def test_too_few_samples_show_no_growth() -> None:
    assert soak.growths(samples(1, 2, 3)) == []
