import json
import os
import signal
import socket
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest
from chat_artifact import write
from click.testing import CliRunner
from counting_artifact import Counting

from runtime.cli import main

ROOT = Path(__file__).parent.parent
KEY = "a-key-of-some-length"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("serve") / "counting", eos=())


def serve(*args, env=None):
    return CliRunner().invoke(main, ["serve", *map(str, args)], env=env)


def start(folder, *args, **env):
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime", "serve", str(folder), "--port", "0", *args],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    line = process.stderr.readline()
    assert line.startswith("serving counting at http://127.0.0.1:"), line
    return process, int(line.split(":")[2].split("/")[0])


def ask(port, path, **headers):
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_ends_cleanly(folder, number):
    process, port = start(folder)
    try:
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        body = json.dumps({"prompt": "a", "max_tokens": 3})
        connection.request(
            "POST", "/v1/completions", body, {"content-type": "application/json"}
        )
        answer = json.loads(connection.getresponse().read())
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("counting", 3)
        connection.close()
    finally:
        process.send_signal(number)
        _, rest = process.communicate(timeout=15)
    assert rest == ""
    assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGTERM)


def test_the_key_comes_from_a_file_or_the_environment(folder, tmp_path):
    (tmp_path / "key").write_text(KEY + "\n")
    for args, env in (
        (("--api-key-file", str(tmp_path / "key")), {}),
        ((), {"MTP_RUN_API_KEY": KEY}),
    ):
        process, port = start(folder, *args, **env)
        try:
            assert ask(port, "/v1/models") == 401
            assert ask(port, "/v1/models", authorization=f"Bearer {KEY}") == 200
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=15)


def test_other_hosts_need_a_key(folder):
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        result = serve(folder, "--host", host)
        assert result.exit_code == 2
        assert "opens the server to other machines, so it needs a key" in result.stderr


@pytest.mark.parametrize("key", ["", "short", "x" * 5000, "sixteen chars or\nmore"])
def test_a_key_that_protects_nothing_is_misuse(folder, tmp_path, key):
    (tmp_path / "key").write_text(key)
    result = serve(folder, "--api-key-file", tmp_path / "key")
    assert result.exit_code == 2
    assert "must hold one key of 16 to 4096" in result.stderr
    assert serve(folder, env={"MTP_RUN_API_KEY": key}).exit_code == 2


def test_a_port_that_is_taken_is_said(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = serve(folder, "--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "cannot listen at 127.0.0.1 port" in result.stderr


def test_what_cannot_be_served_exits_with_1(tmp_path):
    result = serve(Counting().write(tmp_path / "bare"), "--port", 0)
    assert (result.exit_code, "has no tokenizer" in result.stderr) == (1, True)
    broken = write(tmp_path / "broken")
    (broken / "verify.onnx").write_bytes(b"")
    result = serve(broken, "--port", 0)
    assert (result.exit_code, "verify.onnx has the SHA-256" in result.stderr) == (1, True)


def test_without_the_extra_it_says_what_to_install(folder, monkeypatch):
    for name in list(sys.modules):
        if name.startswith("runtime.serve"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = serve(folder, "--port", 0)
    assert result.exit_code == 1
    assert 'pip install "onnx-mtp[serve]"' in result.stderr
