"""Built artifacts for tests of decoding: the trained demo, and a random model of 128 words."""

from canonical import DEMO, tiny

from artifacts import Source, Target
from export.build import Model, build
from export.options import BuildOptions
from export.sources import read_source
from passes.streamed import from_array

__all__ = ["build_demo", "build_tiny", "chi_square", "two_samples"]


def _options(**changes):
    return BuildOptions(
        **{"k": 3, "capacity": 512, "prefill_rows": 64, "target": Target("cpu", "float32")}
        | changes
    )


def build_demo(folder, weights=None, **changes):
    """The trained checkpoint; `weights` replaces some of its arrays by name."""
    model = read_source(DEMO)
    if weights:
        given = {name: from_array(array, name) for name, array in weights.items()}
        fields = ("spec", "source", "eos_token_ids", "files")
        kept = {name: getattr(model, name) for name in fields}
        model = Model(weights={**model.weights, **given}, **kept)
    build(model, folder, _options(**changes), run_check=False)
    return folder


def build_tiny(folder, seed=0, **changes):
    """A random checkpoint of `canonical.tiny`, for which forwards take a fraction of a ms."""
    checkpoint = tiny(seed)
    model = Model(
        spec=checkpoint.spec,
        weights={
            name: from_array(array.numpy(), name)
            for name, array in checkpoint.canonical_weights.items()
        },
        source=Source(kind="synthetic", name="tiny", config_sha256="", left_out=()),
        eos_token_ids=(),
        files={},
    )
    build(model, folder, _options(**{"capacity": 64} | changes), run_check=False)
    return folder


def chi_square(counts, probabilities, least=5):
    """How many standard deviations the statistic lies over what chance gives.

    Args:
        counts: Outcome to how often it came; outcomes without a probability may not be there.
        probabilities: Outcome to its probability.
        least: Outcomes expected more rarely are put together.
    """
    total = sum(counts.values())
    assert counts.keys() <= probabilities.keys()
    cells = [(counts.get(key, 0), share * total) for key, share in probabilities.items()]
    often, rare = _split(cells, lambda cell: cell[1] >= least)
    cells = often + [cell for cell in (rare,) if cell[1] >= least]
    return _deviations(sum((a - b) ** 2 / b for a, b in cells), len(cells) - 1)


def two_samples(first, second, least=5):
    """The same for two counts of as many outcomes each: are they of one distribution?"""
    assert sum(first.values()) == sum(second.values())
    cells = [(first[key], second[key]) for key in first | second]
    often, rare = _split(cells, lambda cell: sum(cell) >= 2 * least)
    cells = often + [cell for cell in (rare,) if sum(cell) >= 2 * least]
    return _deviations(sum((a - b) ** 2 / (a + b) for a, b in cells), len(cells) - 1)


def _split(cells, often):
    """The cells that come often, and the sum of the others."""
    rare = [cell for cell in cells if not often(cell)]
    summed = (sum(a for a, _ in rare), sum(b for _, b in rare))
    return [cell for cell in cells if often(cell)], summed


def _deviations(statistic, free):
    spread = 2 / (9 * free)  # Wilson and Hilferty: its cube root is nearly normal
    return ((statistic / free) ** (1 / 3) - (1 - spread)) / spread**0.5
