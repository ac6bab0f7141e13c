import numpy as np
import pytest
from counting_artifact import Counting
from small_artifacts import build_tiny

from artifacts import Severity
from runtime.check import check_run
from runtime.propose import HeadProposer
from runtime.sampling import Noise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("optional") / "tiny")


def by_code(findings):
    return {f.code: f for f in findings if f.code in ("run.sampling", "run.catch_up")}


def test_a_sound_artifact_is_told_so(folder):
    found = by_code(check_run(folder))
    assert {f.severity for f in found.values()} == {Severity.NOTE}
    assert "sampled tokens are the same with drafts" in found["run.sampling"].message
    assert "misses no row" in found["run.catch_up"].message


def test_a_head_that_misses_rows_is_found(folder, monkeypatch):
    monkeypatch.setattr(HeadProposer, "take_in", lambda self: self._missed.clear())
    found = by_code(check_run(folder))
    assert found["run.catch_up"].severity is Severity.ERROR
    assert found["run.catch_up"].place == "catch_up.onnx"
    assert found["run.sampling"].severity is Severity.NOTE


def test_a_text_that_depends_on_drafts_is_found(folder, monkeypatch):
    random = np.random.default_rng(0)
    monkeypatch.setattr(
        Noise, "row", lambda self, position, ranks: random.gumbel(size=ranks).astype("f4")
    )
    found = by_code(check_run(folder))
    assert found["run.sampling"].severity is Severity.ERROR
    assert "is another for the same seed" in found["run.sampling"].message


def test_a_choice_of_one_that_is_not_greedy_is_found(folder, monkeypatch):
    import runtime.check_optional

    real = runtime.check_optional.SamplingOptions
    monkeypatch.setattr(
        runtime.check_optional,
        "SamplingOptions",
        lambda **options: real(**{name: v for name, v in options.items() if name != "top_k"}),
    )
    found = by_code(check_run(folder))
    assert found["run.sampling"].severity is Severity.ERROR
    assert "is not greedy decoding" in found["run.sampling"].message


def test_an_artifact_without_these_graphs_is_not_asked(tmp_path):
    assert by_code(check_run(Counting().write(tmp_path))) == {}
