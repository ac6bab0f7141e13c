import io

import pytest
from counting_artifact import Counting
from rich.console import Console

from runtime.decode import Decoder
from runtime.report import figures, print_figures
from runtime.state import Finish


@pytest.fixture
def decoder(tmp_path):
    with Decoder.open(Counting().write(tmp_path)) as opened:
        yield opened


def test_before_the_first_step_there_are_no_rates(decoder):
    rows = dict(figures(decoder, 3, None))
    assert rows["ended"] == "because it was interrupted"
    assert rows["output"] == "0 tokens"
    assert rows["target forwards"] == "0"
    assert rows["drafts accepted"] == "none was made"
    assert rows["time"] == "none"


def test_plain_decoding_says_nothing_of_drafts(decoder):
    list(decoder.generate([3, 1], 5, k=0))
    rows = dict(figures(decoder, 0, Finish.LENGTH))
    assert "drafts accepted" not in rows
    assert rows["target forwards"] == "4, 1.00 tokens each"


def test_captures_and_what_became_of_them_are_said(decoder):
    counters = decoder.loaded.slots["verify"].counters
    counters.runs, counters.captures, counters.replays = 9, 1, 8
    graphs = dict(figures(decoder, 3, None))["graphs"]
    assert "verify 9 runs (1 captures, 8 replays)" in graphs
    assert "nothing captured" not in graphs
    counters.invalidations = 2
    assert "(0 fallbacks, 2 invalidations)" in dict(figures(decoder, 3, None))["graphs"]


def test_a_terminal_gets_a_table_and_a_pipe_gets_lines():
    rows = [("output", "20 tokens, [b]1[/b] a second"), ("time", "none")]
    plain, terminal = io.StringIO(), io.StringIO()
    print_figures(rows, Console(file=plain))
    assert plain.getvalue() == "output: 20 tokens, [b]1[/b] a second\ntime: none\n"
    print_figures(rows, Console(file=terminal, force_terminal=True, color_system=None))
    assert "output: " not in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 2
