"""Sampled text: that of an independent sampler over the oracle's logits, drafts or not."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from canonical import demo, tiny
from numpy_sampler import distribution, noise, sample
from prompts import PROMPTS
from small_artifacts import build_demo, build_tiny, chi_square

from runtime.decode import Decoder
from runtime.errors import RequestError
from runtime.load import load
from runtime.propose import Proposal, Proposer
from runtime.sampling import SamplingOptions
from runtime.tokenizer import Tokenizer

OPTIONS = {
    "plain": SamplingOptions(seed=1),
    "nucleus": SamplingOptions(temperature=0.8, top_p=0.9, seed=2),
    "limits": SamplingOptions(temperature=1.2, top_k=30, min_p=0.05, seed=2**64 - 1),
    "penalties": SamplingOptions(
        temperature=0.7, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3,
        seed=4,
    ),
    "greedy penalties": SamplingOptions(temperature=0, frequency_penalty=0.8),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_demo(tmp_path_factory.mktemp("sampled") / "demo")


@pytest.fixture(scope="module")
def decoder(folder):
    with Decoder.open(folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompts(decoder):
    tokenizer = Tokenizer.of(decoder.loaded.folder, decoder.manifest)
    return [tokenizer.encode(text) for text in PROMPTS]


def tokens_of(decoder, ids, count, **options):
    steps = decoder.generate(ids, count, stop_ids=(), **options)
    return [token for step in steps for token in step.tokens]


def oracle_tokens(checkpoint, prompt, count, options):
    model, tokens = checkpoint.model, list(prompt)
    cache = model.new_cache()
    out = model.forward(tokens, cache, 0)
    for _ in range(count):
        draws = options.temperature > 0
        gumbel = noise(options.seed, len(tokens)) if draws else np.zeros(256)
        output = tokens[len(prompt) :]
        tokens.append(sample(out["logits"][-1], options, gumbel, prompt, output))
        out = model.forward(tokens[-1:], cache, len(tokens) - 1)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_text_is_what_the_oracle_samples_with_the_same_noise(decoder, prompts, options):
    want = oracle_tokens(demo(), prompts[1], 40, options)
    assert tokens_of(decoder, prompts[1], 40, sampling=options) == want
    assert decoder.stats.accepted > 0
    assert tokens_of(decoder, prompts[1], 40, sampling=options, k=0) == want


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("number", [3, 8])
def test_a_seed_gives_one_text_however_it_is_drafted(decoder, prompts, options, number):
    ids = prompts[number]
    plain = tokens_of(decoder, ids, 60, sampling=options, k=0)
    for how in ({"k": 1}, {"k": 3}, {"k": 3, "lookup": True}, {"k": "auto", "lookup": True}):
        assert tokens_of(decoder, ids, 60, sampling=options, **how) == plain, how


def test_another_seed_gives_another_text_and_no_seed_a_fresh_one(decoder, prompts):
    texts = set()
    for seed in (1, 2, None, None):
        options = SamplingOptions(seed=seed)
        texts.add(tuple(tokens_of(decoder, prompts[0], 20, sampling=options)))
        assert decoder.sampling.seed is not None
    assert len(texts) == 4


@pytest.mark.parametrize("k", [0, 3])
def test_a_temperature_near_0_and_a_choice_of_one_give_the_greedy_text(decoder, prompts, k):
    want = tokens_of(decoder, prompts[5], 80, k=0)
    for options in (
        SamplingOptions(temperature=1e-6, seed=3),
        SamplingOptions(temperature=5.0, top_k=1, seed=3),
        SamplingOptions(temperature=0),
    ):
        assert tokens_of(decoder, prompts[5], 80, sampling=options, k=k) == want


def test_greedy_text_runs_the_greedy_graphs_alone(folder, prompts):
    with Decoder.open(folder) as fresh:
        tokens_of(fresh, prompts[0], 20, sampling=SamplingOptions(temperature=0))
        slots = fresh.loaded.slots
        assert slots["verify"].counters.runs > 0
        assert slots["verify_sampled"].counters.runs == 0
        assert slots["decode_sampled"].counters.runs == 0
        tokens_of(fresh, prompts[0], 20, sampling=SamplingOptions(seed=1))
        runs = [slots[f"{name}_sampled"].counters.runs for name in ("verify", "decode")]
        assert runs[0] > 0
        assert sum(runs) == fresh.stats.steps + 1  # the first token is sampled too


@pytest.mark.parametrize("length", [1, 2, 64, 65])
def test_a_prompt_of_any_length_may_be_sampled_from(decoder, length):
    ids = [(7 * i) % 500 + 1 for i in range(length)]
    options = SamplingOptions(seed=9)
    want = oracle_tokens(demo(), ids, 6, options)
    assert tokens_of(decoder, ids, 6, sampling=options) == want
    assert tokens_of(decoder, ids, 6, sampling=options, k=0) == want


def test_greedy_text_after_sampled_text_is_as_ever(decoder, prompts):
    want = tokens_of(decoder, prompts[2], 40)
    tokens_of(decoder, prompts[3], 20, sampling=OPTIONS["penalties"])
    assert tokens_of(decoder, prompts[2], 40) == want
    assert decoder.sampling is None


def test_log_probabilities_are_the_targets_own_at_every_row(decoder, prompts):
    ids, options = prompts[4], SamplingOptions(temperature=0.5, presence_penalty=1.0, seed=8)
    steps = list(decoder.generate(ids, 30, stop_ids=(), sampling=options, logprobs=3))
    tokens = [token for step in steps for token in step.tokens]
    found = [entry for step in steps for entry in step.logprobs]
    assert max(len(step.tokens) for step in steps) > 1
    assert [entry.token for entry in found] == tokens
    whole = [*ids, *tokens]
    model = demo().model
    logits = model.forward(whole, model.new_cache(), 0)["logits"][len(ids) - 1 : -1]
    logits = logits.astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for row, entry in zip(want, found, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-3)
        assert [token for token, _ in entry.top] == np.argsort(-row)[:3].tolist()
        assert [share for _, share in entry.top] == pytest.approx(
            np.sort(row)[:-4:-1], abs=1e-3
        )


def test_log_probabilities_end_with_the_tokens_and_come_when_asked(decoder, prompts):
    want = tokens_of(decoder, prompts[0], 30)
    steps = list(decoder.generate(prompts[0], 30, stop_ids=[want[9]], logprobs=0))
    assert sum(len(step.logprobs) for step in steps) == sum(len(s.tokens) for s in steps)
    assert all(entry.top == () for step in steps for entry in step.logprobs)
    assert not any(step.logprobs for step in decoder.generate(prompts[0], 10))
    with pytest.raises(RequestError, match="logprobs is 257; an artifact gives 0 to 256"):
        decoder.generate(prompts[0], 10, logprobs=257)


class Likeliest(Proposer):
    """Drafts what the oracle finds likeliest after the newest token."""

    def __init__(self, buffers, following):
        self.buffers, self.following = buffers, following

    def propose(self, sequence, most):
        drafts = self.following[tuple(sequence.emitted)][:most]
        self.buffers.write("ids", np.array([drafts]), offset=1)
        return Proposal(len(drafts), "likeliest")


def every_text(prompt, length, options):
    """Probability of each text of `length` tokens, and the likeliest one after each first."""
    model, shares, likeliest = tiny().model, {(): 1.0}, {}
    for _ in range(length):
        longer = {}
        for text, share in shares.items():
            logits = model.forward([*prompt, *text], model.new_cache(), 0)["logits"][-1]
            for token, p in distribution(logits, options, prompt, text).items():
                longer[(*text, token)] = share * p
        shares = longer
    for text, share in shares.items():
        best = likeliest.get(text[:1])
        if best is None or share > shares[(*text[:1], *best)]:
            likeliest[text[:1]] = text[1:]
    return shares, likeliest


def test_drafted_texts_have_the_distribution_of_the_target(tmp_path):
    prompt = [3, 77, 12, 9]
    options = SamplingOptions(temperature=0.9, top_k=4, presence_penalty=0.4)
    shares, likeliest = every_text(prompt, 3, options)
    loaded = load(build_tiny(tmp_path / "tiny"), threads=1)
    drafting = Decoder(loaded, proposer=Likeliest(loaded.buffers, likeliest))
    counts, accepted, careless = Counter(), 0, Counter()
    for seed in range(2000):
        text = tokens_of(drafting, prompt, 3, sampling=SamplingOptions(
            temperature=0.9, top_k=4, presence_penalty=0.4, seed=seed,
        ))  # fmt: skip
        counts[tuple(text)] += 1
        accepted += drafting.stats.accepted
        # what a draft accepted for being plausible would do to the text
        careless[(text[0], *(likeliest[text[0],] if seed % 4 == 0 else text[1:]))] += 1
    loaded.close()
    assert accepted > 500
    assert abs(chi_square(counts, shares)) < 3.5
    assert chi_square(careless, shares) > 8
