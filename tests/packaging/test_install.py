"""Installing below a prefix and removing it again, as `make install` and `make uninstall` do."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brainlaned import config, wire
from tests.brainserver import BrainServer
from tests.lane import Lane, config_for
from tests.sources import ROOT, Checkout

COMMAND_S = 60.0
PREFIXES = ("/usr", "/usr/local")


class InstalledLane(Lane):
    """A lane whose daemon is an installed one, started with an empty environment."""

    program = Path()

    def command(self, *, cut: str | None = None, times: int = 1) -> list[str]:
        places = {"--config": self.config, "--state-dir": self.state_dir, "--socket": self.socket}
        return ["/usr/bin/env", "-i", str(self.program), *(str(word) for pair in places.items() for word in pair)]


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a program with an empty environment and return what it printed."""
    done = subprocess.run(
        [str(word) for word in command], env={}, cwd=cwd, capture_output=True, text=True, timeout=COMMAND_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def everything_in(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_is_installed_answers_a_job(
    checkout: Checkout, interpreter: Path, server: BrainServer, tmp_path: Path, prefix: str
) -> None:
    placed = checkout.install(tmp_path / "root", prefix)
    brainctl = placed / "bin/brainctl"
    assert run(brainctl, "--version") == f"brainctl {wire.VERSION}\n"
    assert run(placed / "bin/brainlaned", "--version") == f"{wire.VERSION}\n"
    lane = InstalledLane(tmp_path / "lane", config_for(server.base_url))
    lane.program = placed / "bin/brainlaned"
    lane.start()
    try:
        # By way of a link, as an administrator may have made one.
        (tmp_path / "ask").symlink_to(brainctl)
        ask = (tmp_path / "ask", "--socket", lane.socket)
        assert run(*ask, "submit", "--wait", "hello", cwd=ROOT) == "hello world"
        assert "done" in run(*ask, "list")
    finally:
        assert lane.stop() == 0, lane.log.read_text()
    assert "Traceback" not in lane.log.read_text()
    assert server.count("hello") == 1


def test_an_installed_brainctl_loads_no_more_than_that_of_the_checkout(
    checkout: Checkout, interpreter: Path, tmp_path: Path
) -> None:
    placed = checkout.install(tmp_path, "/usr/local")

    def loaded(*words: object) -> set[str]:
        done = subprocess.run(
            [interpreter, "-IS", "-X", "importtime", *map(str, words), "--version"],
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=True,
        )
        return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}

    bare = f"import sys; sys.path.insert(0, {str(placed / 'lib/brainlane')!r}); import brainctl.__main__ as main"
    assert "brainctl.cli" in loaded(placed / "bin/brainctl")
    assert loaded(placed / "bin/brainctl") - loaded("-c", f"{bare}; sys.exit(main.main())") == set()


@pytest.mark.parametrize("prefix", [*PREFIXES, "/opt/brainlane/usr"])
def test_units_name_the_programs_where_they_are_installed(checkout: Checkout, tmp_path: Path, prefix: str) -> None:
    placed = checkout.install(tmp_path, prefix)
    units = {path.name: path.read_text() for path in placed.glob("lib/systemd/system/*")}
    assert set(units) == {path.name for path in checkout.path.glob("systemd/*.*")}
    started = {word for text in units.values() for word in re.findall(r"^Exec\w+=[-@:+!]*(\S+)", text, re.MULTILINE)}
    assert f"{prefix}/bin/brainlaned" in started
    for program in started - {"/usr/bin/python3"}:
        assert program.startswith(f"{prefix}/bin/")
        assert os.access(f"{tmp_path}{program}", os.X_OK), f"a unit starts {program}, which is not there"
    for name, text in units.items():
        original = (checkout.path / "systemd" / name).read_text()
        expected = re.sub("/usr/(bin/brain|lib/brainlane|share/doc/brainlane)", rf"{prefix}/\1", original)
        assert text == expected, "more is rewritten than our own places"


def test_no_text_names_a_place_of_ours_below_another_prefix(checkout: Checkout, tmp_path: Path) -> None:
    placed = checkout.install(tmp_path, "/opt/lane")
    texts = [path for path in placed.rglob("*") if path.is_file() and placed / "lib/brainlane" not in path.parents]
    assert len(texts) > 10
    for path in texts:
        assert not re.search(r"/usr/(?:local/)?(?:bin/brain|(?:lib|share/doc)/brainlane)", path.read_text()), path


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_systemd_looks_for_units_where_they_are_installed(prefix: str) -> None:
    found = subprocess.run(["systemd-analyze", "unit-paths"], capture_output=True, text=True, check=True)
    assert f"{prefix}/lib/systemd/system" in found.stdout.splitlines()


def test_the_rest_is_where_its_readers_look(checkout: Checkout, tmp_path: Path) -> None:
    placed = checkout.install(tmp_path, "/usr/local")
    for page in checkout.path.glob("man/*.[1-8]"):
        assert (placed / f"share/man/man{page.suffix[1]}/{page.name}").is_file()
    for drop_in in checkout.path.glob("systemd/drop-ins/*.conf"):
        # An example, which no systemd reads before somebody copies it.
        assert (placed / "share/doc/brainlane/drop-ins" / drop_in.name).is_file()
    for catalog in checkout.path.glob("packaging/*.catalog"):
        assert (placed / "lib/systemd/catalog" / catalog.name).is_file()
    assert 'u brainlane - "brainlane daemon"' in (placed / "lib/sysusers.d/brainlane.conf").read_text()
    # Without this directory the service does not start, and what will lie in it is for nobody else.
    assert (tmp_path / "etc/brainlane/credentials").stat().st_mode & 0o7777 == 0o700


def test_modes_do_not_depend_on_the_umask_or_on_those_of_the_checkout(checkout: Checkout, tmp_path: Path) -> None:
    closed = checkout.copy(tmp_path / "checkout")
    for path in (*closed.path.glob("brainlaned/**/*"), *closed.path.glob("man/*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    done = closed.run("install", "--destdir", tmp_path / "root", "--build", checkout.build, umask=0o077)
    assert done.returncode == 0, done.stderr
    for path in (tmp_path / "root").rglob("*"):
        expected = 0o755 if path.is_dir() or path.parent.name == "bin" else 0o644
        assert path.stat().st_mode & 0o7777 == (0o700 if path.name == "credentials" else expected), path


def test_three_shells_complete_brainctl(checkout: Checkout, tmp_path: Path) -> None:
    placed = checkout.install(tmp_path, "/usr")
    for shell in (
        "bash-completion/completions/brainctl",
        "fish/vendor_completions.d/brainctl.fish",
        "zsh/vendor-completions/_brainctl",
    ):
        assert "_BRAINCTL_COMPLETE=" in (placed / "share" / shell).read_text()


# The tree.


def test_the_tree_is_pure_python_without_traces_of_its_making(checkout: Checkout, tmp_path: Path) -> None:
    tree = checkout.install(tmp_path, "/usr/local") / "lib/brainlane"
    files = [path for path in tree.rglob("*") if path.is_file()]
    assert {"brainlaned", "brainctl", "httpx", "starlette", "typer", "uvicorn"} <= {
        path.name for path in tree.iterdir()
    }
    for path in files:
        assert path.read_bytes()[:4] != b"\x7fELF", f"{path} is compiled"
        assert path.suffix not in {".so", ".pyc"}, path
        assert path.name not in {"RECORD", "direct_url.json", "INSTALLER", "REQUESTED", "uv_build.json"}, path
        assert os.fsencode(tmp_path) not in path.read_bytes(), f"{path} names the place where it was built"
    assert not [path for path in tree.rglob("*") if path.name in {"tests", "__pycache__", "bin"}]
    # All of ours: what is installed is what stands in the checkout.
    for package in ("brainlaned", "brainctl"):
        assert everything_in(tree / package) == everything_in(checkout.path / package)


def test_compiled_code_is_refused_and_nothing_installed(checkout: Checkout, tmp_path: Path) -> None:
    planted = checkout.copy(tmp_path / "checkout")
    (planted.path / "brainlaned/fast").write_bytes(b"\x7fELF\x02\x01\x01")
    done = planted.run("install", "--destdir", tmp_path / "root", "--build", checkout.build)
    assert done.returncode != 0
    assert "'brainlaned/fast' is compiled" in done.stderr
    assert not [path for path in (tmp_path / "root").rglob("*") if path.is_file()]


def test_a_library_that_nobody_pinned_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    planted = checkout.copy(tmp_path / "checkout")
    (libraries,) = checkout.build.glob("libraries-*")
    (kept,) = (path for path in libraries.glob("httpx-*.dist-info"))
    shutil.copytree(libraries, tmp_path / "build" / libraries.name)
    (tmp_path / "build" / libraries.name / kept.name).rename(
        tmp_path / "build" / libraries.name / "httpx-99.0.dist-info"
    )
    done = planted.run("install", "--destdir", tmp_path / "root", "--build", tmp_path / "build")
    assert done.returncode != 0
    assert "nothing in pyproject.toml pins httpx to '99.0'" in done.stderr


# Removing it.


@pytest.mark.parametrize("prefix", PREFIXES)
def test_uninstalling_leaves_nothing(checkout: Checkout, interpreter: Path, tmp_path: Path, prefix: str) -> None:
    (tmp_path / "there").mkdir()
    placed = checkout.install(tmp_path, prefix)
    # As root does when nobody has compiled it.
    subprocess.run([interpreter, "-m", "compileall", "-q", placed / "lib/brainlane/brainctl"], check=True)
    assert list(placed.glob("lib/brainlane/brainctl/__pycache__/*.pyc"))
    checkout.uninstall(tmp_path, prefix)
    assert everything_in(tmp_path) == {"there"}


def test_uninstalling_leaves_what_is_not_ours(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "usr/local/bin").mkdir(parents=True)
    placed = checkout.install(tmp_path, "/usr/local")
    kept = {
        *("usr/local/share/man/man1/other.1", "usr/local/lib/systemd/system/other.service"),
        *("etc/brainlane/brainlaned.toml", "etc/brainlane/credentials/openai"),
    }
    for name in kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    checkout.uninstall(tmp_path, "/usr/local")
    assert {name for name in everything_in(tmp_path) if (tmp_path / name).is_file()} == kept
    assert list((placed / "bin").iterdir()) == []
    assert not (placed / "lib/brainlane").exists()
    assert not (placed / "share/doc").exists()


def test_another_version_replaces_the_one_before_and_is_removed_whole(checkout: Checkout, tmp_path: Path) -> None:
    older = checkout.copy(tmp_path / "older")
    (older.path / "brainlaned/gone.py").touch()
    (older.path / "man/gone.5").write_text("")
    (older.path / "systemd/gone.service").write_text("")
    root = tmp_path / "root"
    (root / "there").mkdir(parents=True)
    placed = older.install(root, "/usr/local")
    gone = ("lib/brainlane/brainlaned/gone.py", "share/man/man5/gone.5", "lib/systemd/system/gone.service")
    assert all((placed / name).is_file() for name in gone)
    key = root / "etc/brainlane/credentials/openai"
    key.write_text("kept")
    checkout.install(root, "/usr/local")
    assert not any((placed / name).exists() for name in gone)
    assert key.read_text() == "kept"
    assert not list(placed.glob("lib/.brainlane-*"))
    key.unlink()
    checkout.uninstall(root, "/usr/local")
    assert everything_in(root) == {"there"}


def test_uninstalling_what_is_not_installed_says_so(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.run("uninstall", "--destdir", tmp_path)
    assert done.returncode != 0
    assert done.stderr.startswith(f"cannot uninstall: '{tmp_path}/usr/local/lib/brainlane/installed'")


# The example of a configuration.


def test_the_example_configuration_shows_the_defaults(tmp_path: Path) -> None:
    example = (ROOT / "packaging/brainlaned.toml").read_text()
    path = tmp_path / "brainlaned.toml"
    path.write_text(example)
    as_it_is = config.load(path)
    # Now with everything that stands in it as a default, but not the other routes.
    parts = [part for part in example.split("\n\n") if not part.startswith("# A ")]
    path.write_text("\n\n".join(re.sub(r"^# (\w+ = )", r"\1", part, flags=re.MULTILINE) for part in parts))
    assert "\nstop_grace_s = " in path.read_text()
    assert config.load(path) == as_it_is
    without_any = config.load(None)
    assert as_it_is.routes["local"].may_run_twice
    path.write_text(example.replace("\nmay_run_twice", "\n# may_run_twice"))
    assert config.load(path) == without_any


def test_the_other_routes_of_the_example_are_routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = (ROOT / "packaging/brainlaned.toml").read_text()
    path = tmp_path / "brainlaned.toml"
    (tmp_path / "keys_openai").write_text("sk-example")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    path.write_text(re.sub(r"^# (\[routes|base_url|model|api_key|kind|command)", r"\1", example, flags=re.MULTILINE))
    assert set(config.load(path).routes) == {"local", "openai", "command"}


def test_the_scripts_of_packaging_are_clean() -> None:
    scripts = [ROOT / "packaging" / name for name in ("tree", "install", "uninstall", "deb")]
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    # Ruff finds only *.py by itself.
    for words in (("check",), ("format", "--check")):
        done = subprocess.run([ruff, *words, *scripts], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
