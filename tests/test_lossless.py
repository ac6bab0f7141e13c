"""MTP decoding gives the tokens of greedy decoding, with the oracle's acceptance.

The expected tokens and acceptance come from the NumPy oracle (tests/oracle_acceptance.py).
"""

import json
from functools import cache
from pathlib import Path

import pytest

import export
from artifacts import Target
from export.build import build
from export.options import BuildOptions
from export.sources import read_source
from runtime.decode import Decoder

EXPECTED = json.loads((Path(__file__).parent / "data" / "oracle_acceptance.json").read_text())
CHECKPOINT = Path(export.__file__).parent / "demo" / "tiny-hybrid-mtp"


@pytest.fixture(scope="module", params=[1, 2, 3, 5])
def decoder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lossless") / "artifact"
    options = BuildOptions(
        k=request.param, capacity=512, prefill_rows=64, target=Target("cpu", "float32")
    )
    build(read_source(CHECKPOINT), folder, options, run_check=False)
    with Decoder.open(folder) as opened:
        yield opened


@cache
def cases():
    return EXPECTED["cases"]


@pytest.mark.parametrize("number", range(20))
def test_mtp_gives_the_oracles_tokens_and_acceptance(decoder, number):
    case, k = cases()[number], decoder.manifest.k
    tokens = list(decoder.prefill(case["ids"]).tokens)
    forwards = decoder.loaded.slots["verify"].counters.runs
    while len(tokens) < EXPECTED["new_tokens"]:  # as the oracle: the last round may overshoot
        tokens += decoder.step(k).tokens
    assert tokens[: EXPECTED["new_tokens"]] == case["tokens"]
    expected = case["drafts"][str(k)]
    assert decoder.stats.positions == expected["positions"]
    assert decoder.stats.steps == expected["rounds"]
    # exactly one target forward a step
    assert decoder.loaded.slots["verify"].counters.runs - forwards == expected["rounds"]


@pytest.mark.parametrize("number", [0, 7, 13])
def test_plain_decoding_gives_the_oracles_tokens(decoder, number):
    case = cases()[number]
    steps = decoder.generate(case["ids"], EXPECTED["new_tokens"], k=0, stop_ids=())
    assert [token for step in steps for token in step.tokens] == case["tokens"]
    assert decoder.stats.steps == EXPECTED["new_tokens"] - 1
    assert decoder.stats.drafted == 0
