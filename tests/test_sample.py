"""The sampling nodes against a sampler that sorts the whole vocabulary in float64."""

import dataclasses

import numpy as np
import pytest
from golden import parse, run, unchanged
from numpy_sampler import RANKS, noise, sample
from onnx_ir.passes import PreconditionError

from passes.accept import AcceptPass, GreedyTailPass
from passes.sample import SamplePass
from runtime.sampling import SamplingOptions

M, V = 4, 600


def verify(vocab=V, kind="float"):
    """A verify graph that is nothing but its end."""
    model = parse(f"""
        verify (int64[1,{M}] input_ids, int32[1] past_length, int32[1] draft_count,
                {kind}[1,{M},{vocab}] given) => ({kind}[1,{M},{vocab}] logits)
        {{ logits = Identity(given) }}
    """)
    AcceptPass(M)(model)
    return model


def decode(vocab=V):
    model = parse(f"""
        decode (int32[1] past_length, float[1,1,{vocab}] given) =>
               (float[1,1,{vocab}] logits)
        {{
            zero = Constant <value = int32[1] {{0}}> ()
            last_row = Add(past_length, zero)
            logits = Identity(given)
        }}
    """)
    GreedyTailPass()(model)
    return model


def feeds(options, logits, gumbel, prompt=(), output=()):
    vocab = logits.shape[-1]
    ranks = min(RANKS, vocab)
    seen = np.zeros(vocab, np.float32)
    seen[list(prompt)] = 1
    counts = np.bincount(np.array(output, int), minlength=vocab).astype(np.float32)
    one = lambda value: np.array([value], np.float32)  # noqa: E731
    return {
        "given": logits[None],
        "sample.noise": gumbel[None, :, :ranks].astype(np.float32),
        "sample.prompt": seen,
        "sample.counts": counts,
        "sample.top_k": np.array([options.top_k or RANKS], np.int32),
        "sample.temperature": one(options.temperature),
        "sample.top_p": one(options.top_p if options.top_p < 1 else 2),
        "sample.min_p": one(options.min_p),
        "sample.repetition_penalty": one(options.repetition_penalty),
        "sample.presence_penalty": one(options.presence_penalty),
        "sample.frequency_penalty": one(options.frequency_penalty),
        "past_length": np.array([7], np.int32),
    }


OPTIONS = {
    "plain": SamplingOptions(),
    "cool": SamplingOptions(temperature=0.5),
    "hot": SamplingOptions(temperature=3.0),
    "top k": SamplingOptions(top_k=5),
    "top 1": SamplingOptions(top_k=1),
    "top p": SamplingOptions(temperature=0.8, top_p=0.7),
    "tiny top p": SamplingOptions(top_p=0.0001),
    "min p": SamplingOptions(min_p=0.1),
    "repetition": SamplingOptions(repetition_penalty=1.5),
    "reward": SamplingOptions(repetition_penalty=0.6, presence_penalty=-1.0),
    "presence": SamplingOptions(presence_penalty=2.0),
    "frequency": SamplingOptions(frequency_penalty=0.7),
    "all": SamplingOptions(
        temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.3,
        presence_penalty=0.4, frequency_penalty=0.3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("vocab", [V, 90])
def test_each_row_samples_what_a_full_sort_samples(options, vocab):
    random = np.random.default_rng(3)
    model = verify(vocab)
    SamplePass()(model)
    session = _session(model)
    seen = 0
    for seed in range(12):
        logits = (2.5 * random.standard_normal((M, vocab))).astype(np.float32)
        gumbel = np.stack([noise(seed, 7 + r) for r in range(M)])
        likely = np.argsort(-logits.max(axis=0))[:30].tolist()
        prompt, output = likely[:9], [*likely[5:14], likely[6], likely[6]]
        ids = [output[-1], *(int(logits[r].argmax()) for r in range(M - 1))]
        want = [
            sample(logits[r], options, gumbel[r], prompt, [*output, *ids[1 : r + 1]])
            for r in range(M)
        ]
        got = session(
            feeds(options, logits, gumbel, prompt, output)
            | {"input_ids": np.array([ids]), "draft_count": np.array([M - 1], np.int32)}
        )
        assert got["best"][0].tolist() == want
        stands = next((r for r in range(M - 1) if ids[r + 1] != want[r]), M - 1)
        assert got["accepted"].tolist() == [stands]
        assert got["result"].tolist() == [stands, 8 + stands, *want, 1, 1, 1, 1]
        assert got["next_token"].tolist() == [[want[stands]]]
        seen += stands
    assert seen or options.top_k != 1 or options.penalises


def _session(model):
    import onnx_ir as ir
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return lambda given: dict(zip(names, session.run(names, given), strict=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decode_samples_the_same(options):
    logits = np.random.default_rng(1).standard_normal((1, V)).astype(np.float32) * 3
    gumbel = noise(5, 8)[None]
    model = decode()
    SamplePass()(model)
    got = run(model, **feeds(options, logits, gumbel, [1, 2, 3], [3, 4]))
    want = sample(logits[0], options, gumbel[0], [1, 2, 3], [3, 4])
    assert got["best"].tolist() == got["next_token"].tolist() == [[want]]
    assert got["result"].tolist() == [0, 8, want, 1]


def test_a_penalty_can_lift_a_token_over_the_likeliest():
    logits = np.linspace(3, -3, V, dtype=np.float32)[None]
    options = SamplingOptions(top_k=1, presence_penalty=-10.0)
    model = decode()
    SamplePass()(model)
    got = run(model, **feeds(options, logits, np.zeros((1, RANKS)), [], [100]))
    assert got["best"].tolist() == [[100]]


def test_a_temperature_near_zero_takes_the_likeliest_without_overflow():
    logits = np.random.default_rng(2).standard_normal((1, V)).astype(np.float32) * 50
    options = dataclasses.replace(SamplingOptions(), temperature=1e-30)
    model = decode()
    SamplePass()(model)
    got = run(model, **feeds(options, logits, noise(1, 1)[None]))
    assert got["best"].tolist() == [[int(logits.argmax())]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_told_whatever_is_sampled(bad):
    logits = np.zeros((M, V), np.float32)
    logits[1, :] = bad if np.isnan(bad) else 0
    logits[1, 17] = bad
    model = verify()
    SamplePass()(model)
    gumbel = np.stack([noise(9, r) for r in range(M)])
    got = run(
        model,
        **feeds(SamplingOptions(), logits, gumbel),
        input_ids=np.zeros((1, M), np.int64),
        draft_count=np.array([3], np.int32),
    )
    assert got["result"][2 + M :].tolist() == [1, 0, 1, 1]
    assert (got["best"] >= 0).all()
    assert (got["best"] < V).all()


def test_half_precision_logits_are_ranked_as_they_are_and_sampled_in_float32():
    model = verify(kind="float16")
    SamplePass()(model)
    logits = np.random.default_rng(4).standard_normal((M, V)).astype(np.float16)
    gumbel = np.stack([noise(2, r) for r in range(M)])
    options = SamplingOptions(top_k=20)
    got = run(
        model,
        **feeds(options, logits, gumbel),
        input_ids=np.zeros((1, M), np.int64),
        draft_count=np.array([0], np.int32),
    )
    wide = logits.astype(np.float32)
    assert got["best"][0].tolist() == [sample(wide[r], options, gumbel[r]) for r in range(M)]


def test_a_second_call_changes_nothing():
    for model in (verify(), decode()):
        SamplePass()(model)
        assert unchanged(SamplePass(), model)


def test_a_graph_whose_best_is_no_argmax_is_refused():
    model = parse("""
        g (float[1,1,8] given, int64[1,1] token) => (float[1,1,8] logits, int64[1,1] best)
        { logits = Identity(given) best = Identity(token) }
    """)
    with pytest.raises(PreconditionError, match="best of graph 'g' is no ArgMax"):
        SamplePass()(model)


def test_a_graph_without_logits_is_refused():
    with pytest.raises(PreconditionError, match="no output 'logits'"):
        SamplePass()(parse("g (float[1] x) => (float[1] best) { best = Identity(x) }"))
