"""README is true: its commands run as written, and print what it shows."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import export.cli
import runtime.cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
VENV = "python3 -m venv .venv && .venv/bin/pip install -q "
COMMANDS = {"mtp-export": "export.cli", "mtp-run": "runtime.cli"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder like a fresh checkout, where what is made stays out of this one."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "export").symlink_to(ROOT / "export")
    (folder / "bin").mkdir()
    for name, module in COMMANDS.items():
        code = f"from {module} import main; main(prog_name={name!r})"
        script = f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -c {shlex.quote(code)} "
        (folder / "bin" / name).write_text(script + '"$@"\n')
        (folder / "bin" / name).chmod(0o755)
    return folder


def shell(command, folder, **keywords):
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=keywords.get("stderr", subprocess.PIPE),
        text=True,
    )


def blocks(kind=""):
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def one_liners():
    return [line.strip() for line in README.splitlines() if line.startswith("    python3 -m")]


def pattern(shown):
    """What is shown as a regular expression: times may differ, ``..`` is anything."""
    lines = []
    for line in shown.splitlines():
        if line == "..":
            lines.append(r"(?:.*\n)*?")
        else:
            text = re.escape(line)
            text = re.sub(r"\d+\\\.\d+\\ (s\b|tokens/s)", r"\\d+\\.\\d+\\ \1", text)
            lines.append(text + r"\n")
    return "".join(lines)


def test_the_first_command_shows_the_demo_that_is_shown(checkout):
    command, shown = one_liners()[0], blocks()[0]
    assert command.startswith(VENV + ". && ")
    result = shell(command.removeprefix(VENV + ". && ").replace(".venv/bin/", ""), checkout)
    assert result.returncode == 0, result.stderr
    assert re.match(pattern(shown), result.stdout), result.stdout


def test_the_test_command_is_that_of_ci_and_installs_what_it_needs():
    command = one_liners()[1]
    assert command.startswith(VENV + '-e ".[dev]" && ')
    tests = command.rpartition(".venv/bin/")[2]
    assert tests in (ROOT / ".ci" / "run").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dev = " ".join(extras["optional-dependencies"]["dev"])
    assert "pytest>=" in dev
    assert "pytest-xdist>=" in dev  # for -n auto
    known = subprocess.run(
        [*shlex.split(tests.replace("python", shlex.quote(sys.executable), 1)), "--version"],
        cwd=ROOT,
        capture_output=True,
    )
    assert known.returncode == 0


def test_the_session_and_the_snippet_run_as_written(checkout):
    (session,) = [block for block in blocks() if block.startswith("$ ")]
    for step in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, _, shown = step.partition("\n")
        result = shell(command, checkout, stderr=subprocess.STDOUT)
        assert result.returncode == 0, result.stdout
        assert re.search(pattern(shown), result.stdout), result.stdout
    snippet, *others = blocks("python")
    for other in others:
        result = shell(f"{shlex.quote(sys.executable)} -P -c {shlex.quote(other)}", checkout)
        assert result.returncode == 0, result.stderr
    result = shell(f"{shlex.quote(sys.executable)} -P -c {shlex.quote(snippet)}", checkout)
    assert result.returncode == 0, result.stderr
    *steps, per_step = result.stdout.splitlines()
    tokens = [int(n) for line in steps for n in re.findall(r"\d+", line.rpartition(" ")[0])]
    assert len(tokens) == 64
    assert float(per_step) > 1.5


def test_every_option_of_the_synopsis_is_there():
    groups = {"mtp-export": export.cli.main, "mtp-run": runtime.cli.main}
    lines = re.findall(r"^    (mtp-\w+) (\w+) (.*)$", README, re.MULTILINE)
    assert len(lines) >= 4
    for program, name, rest in lines:
        command = groups[program].commands[name]
        options = {
            opt
            for parameter in command.params
            if isinstance(parameter, click.Option)
            for opt in parameter.opts
        }
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest)) <= options, (name, rest)


def test_links_and_paths_resolve():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    paths = [p for p in re.findall(r"`([\w./-]+/[\w./-]*)`", README) if not p.startswith("/")]
    local = [link for link in links if "://" not in link]
    assert paths
    for path in (*local, *paths):
        assert (ROOT / path).exists(), path


def test_the_rooms_of_the_table_are_the_rooms():
    rooms = set(re.findall(r"^\| `(\w+)/` \|", README, re.MULTILINE))
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert rooms == set(wheel["targets"]["wheel"]["packages"])
