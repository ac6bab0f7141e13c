import dataclasses
import json

import numpy as np
import pytest
from counting_artifact import Counting
from numpy_sampler import RANKS
from numpy_sampler import noise as slow_noise

from artifacts import Manifest
from artifacts.buffers import sample_buffers
from runtime.buffers import CpuBuffers
from runtime.decode import Decoder
from runtime.errors import RequestError
from runtime.sampling import BLOCK, Noise, Sampler, SamplingOptions


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be from 0 to 100"),
        ({"temperature": float("nan")}, "temperature is nan; it must be from 0 to 100"),
        ({"temperature": float("inf")}, "temperature is inf; it must be"),
        ({"temperature": "1"}, "temperature is '1'; give a number"),
        ({"temperature": True}, "temperature is True; give a number"),
        ({"temperature": None}, "temperature is None; give a number"),
        ({"temperature": 10**400}, r"temperature is 1000.*\.\.\.; it must be"),
        ({"top_k": 257}, r"top_k is 257; .*0 \(no limit\) to 256, since .* the 256 likeliest"),
        ({"top_k": -1}, "top_k is -1; it must be"),
        ({"top_k": 1.5}, "top_k is 1.5; give a whole number"),
        ({"top_p": 1.1}, "top_p is 1.1; it must be from 0 to 1"),
        ({"min_p": -1}, "min_p is -1; it must be from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be from 0.01 to 100"),
        ({"presence_penalty": 101.0}, "presence_penalty is 101.0; it must be from -100"),
        ({"frequency_penalty": [1]}, r"frequency_penalty is \[1\]; give a number"),
        ({"seed": -1}, "seed is -1; it must be from 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be"),
        ({"seed": 1.0}, "seed is 1.0; give a whole number"),
        ({"temprature": 1}, "no sampling option 'temprature', only temperature, top_k"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(values, message):
    with pytest.raises(RequestError, match=message):
        SamplingOptions.parse(values)


def test_options_survive_a_round_through_json():
    options = SamplingOptions(temperature=0.7, top_k=5, seed=2**64 - 1)
    assert SamplingOptions.parse(json.loads(json.dumps(options.to_json()))) == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 1


def test_only_temperature_0_without_penalties_is_greedy():
    assert SamplingOptions(temperature=0, top_k=3).is_greedy
    assert not SamplingOptions(temperature=1e-6).is_greedy
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert not SamplingOptions(temperature=0, **{name: 0.5}).is_greedy


def test_a_seed_is_drawn_where_none_was_given():
    drawn = {SamplingOptions().with_seed().seed for _ in range(3)}
    assert len(drawn) == 3
    assert SamplingOptions(seed=4).with_seed().seed == 4


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_noise_is_the_stream_of_the_seed_whatever_is_asked_first(seed):
    made = Noise(seed)
    for position in (BLOCK + 1, 0, 5, 3 * BLOCK, 5, BLOCK - 1, BLOCK):
        want = slow_noise(seed, position).astype(np.float32)
        assert np.array_equal(made.row(position, RANKS), want)
        assert np.array_equal(made.row(position, 7), want[:7])


def test_noise_is_gumbel_noise():
    values = np.stack([Noise(3).row(p, RANKS) for p in range(400)]).astype(np.float64)
    assert abs(values.mean() - np.euler_gamma) < 0.02
    assert abs(values.var() - np.pi**2 / 6) < 0.03
    # the largest of equals is each of them as often
    picks = np.bincount(values[:, :8].argmax(axis=1), minlength=8)
    assert ((picks - 50) ** 2 / 50).sum() < 24  # 7 degrees of freedom: 0.1 %
    assert not np.array_equal(Noise(3).row(1, 9), Noise(4).row(1, 9))


@pytest.fixture
def manifest(tmp_path):
    """Of an artifact that says it samples; nothing of it is run."""
    made = Manifest.read(Counting(vocab=300).write(tmp_path))
    decode = made.graphs["decode"]
    return dataclasses.replace(made, graphs={**made.graphs, "decode_sampled": decode})


def begun(manifest, prompt=(1, 2), **options):
    buffers = CpuBuffers(sample_buffers(manifest.rows, manifest.spec.vocab_size))
    sampler = Sampler(SamplingOptions(**options), manifest, buffers)
    sampler.begin(prompt)
    return sampler, buffers


def test_rows_get_the_noise_of_the_positions_that_their_tokens_will_have(manifest):
    sampler, buffers = begun(manifest, seed=11)
    sampler.before_forward(29, 4)
    want = np.stack([slow_noise(11, 30 + r) for r in range(4)]).astype(np.float32)
    assert np.array_equal(buffers.read("sample.noise")[0], want)
    sampler.before_forward(32, 1)
    assert np.array_equal(buffers.read("sample.noise")[0, 0], want[3])


def test_no_limit_is_one_that_nothing_reaches(manifest):
    _, buffers = begun(manifest)
    assert buffers.read("sample.top_k").tolist() == [256]
    assert buffers.read("sample.top_p").tolist() == [2.0]
    _, buffers = begun(manifest, top_k=9, top_p=0.5, min_p=0.25, temperature=0.125)
    assert buffers.read("sample.top_k").tolist() == [9]
    for name, value in (("top_p", 0.5), ("min_p", 0.25), ("temperature", 0.125)):
        assert buffers.read(f"sample.{name}").tolist() == [value]


def test_penalties_at_temperature_0_draw_nothing(manifest):
    sampler, buffers = begun(manifest, temperature=0, presence_penalty=1.0)
    sampler.before_forward(5, 4)
    assert not buffers.read("sample.noise").any()
    assert buffers.read("sample.top_k").tolist() == [1]
    assert buffers.read("sample.temperature").tolist() == [1.0]


def test_prompt_and_output_are_told_where_penalties_need_them(manifest):
    sampler, buffers = begun(manifest, prompt=[5, 9, 5], presence_penalty=0.5)
    sampler.emitted([7, 8, 7])
    sampler.emitted([7])
    assert np.flatnonzero(buffers.read("sample.prompt")).tolist() == [5, 9]
    counts = buffers.read("sample.counts")
    assert {int(i): counts[i] for i in np.flatnonzero(counts)} == {7: 3, 8: 1}
    sampler, buffers = begun(manifest, prompt=[5, 9, 5])
    sampler.emitted([7])
    assert not buffers.read("sample.prompt").any()
    assert not buffers.read("sample.counts").any()


def test_an_artifact_without_the_graphs_says_so_at_once(tmp_path):
    with Decoder.open(Counting().write(tmp_path)) as decoder:
        with pytest.raises(RequestError, match=r"built without sampling.*--no-sampling"):
            decoder.generate([1], 5, sampling=SamplingOptions())
        with pytest.raises(RequestError, match="built without sampling"):
            decoder.prefill([1], sampling=SamplingOptions(presence_penalty=1.0, temperature=0))
        greedy = decoder.generate([1], 5, sampling=SamplingOptions(temperature=0))
        tokens = [token for step in greedy for token in step.tokens]
        assert tokens == Counting().greedy([1], 5)
        assert decoder.sampling is None
