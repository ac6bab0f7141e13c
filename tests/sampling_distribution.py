"""Write tests/data/sampling_distribution.json: 20,000 sampled texts, drafted and not.

    python tests/sampling_distribution.py            # some ten minutes on one core

For the random model of 128 words, drafts being the likeliest tokens, drafted texts are held
against the exact distribution that the NumPy oracle gives. For the demo checkpoint with its
own head, drafted texts are held against undrafted ones of other seeds. The figure is how many
standard deviations chi-square lies over what chance gives; within 3 says nothing against
equality. A faulty rule is measured beside: one that lets every fourth draft stand.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "oracle"), str(HERE.parent)]

from prompts import PROMPTS  # noqa: E402
from small_artifacts import build_demo, build_tiny, chi_square, two_samples  # noqa: E402
from test_sampled_decoding import Likeliest, every_text  # noqa: E402

from runtime.decode import Decoder  # noqa: E402
from runtime.load import load  # noqa: E402
from runtime.sampling import SamplingOptions  # noqa: E402
from runtime.tokenizer import Tokenizer  # noqa: E402

TEXTS = 20_000
TINY = {"temperature": 0.9, "top_k": 4, "presence_penalty": 0.4}
DEMO = {"temperature": 1.1, "top_k": 3, "top_p": 0.97}


def texts(decoder, prompt, length, options, seeds, **how):
    """Counts of the texts and the share of drafts that stood."""
    counts, drafted, accepted = Counter(), 0, 0
    for seed in seeds:
        sampling = SamplingOptions(**options, seed=seed)
        steps = decoder.generate(prompt, length, stop_ids=(), sampling=sampling, **how)
        counts[tuple(token for step in steps for token in step.tokens)] += 1
        drafted += decoder.stats.drafted
        accepted += decoder.stats.accepted
    return counts, accepted / drafted if drafted else None


def of_tiny(folder, number):
    prompt = [3, 77, 12, 9]
    shares, likeliest = every_text(prompt, 3, SamplingOptions(**TINY))
    loaded = load(build_tiny(folder / "tiny"), threads=1)
    decoder = Decoder(loaded, proposer=Likeliest(loaded.buffers, likeliest))
    counts, stood = texts(decoder, prompt, 3, TINY, range(number))
    faulty = Counter()
    for place, text in enumerate(counts.elements()):
        drafted = (text[0], *likeliest[text[0],]) if place % 4 == 0 else text
        faulty[drafted] += 1
    loaded.close()
    return {
        "options": TINY,
        "outcomes": len(shares),
        "drafts_accepted": stood,
        "deviations": chi_square(counts, shares),
        "deviations_of_a_faulty_rule": chi_square(faulty, shares),
    }


def of_demo(folder, number):
    loaded = load(build_demo(folder / "demo"), threads=1)
    decoder = Decoder(loaded)
    prompt = Tokenizer.of(loaded.folder, loaded.manifest).encode(PROMPTS[1])
    drafted, stood = texts(decoder, prompt, 4, DEMO, range(number), k=3)
    plain, _ = texts(decoder, prompt, 4, DEMO, range(number, 2 * number), k=0)
    loaded.close()
    return {
        "options": DEMO,
        "outcomes": len(drafted | plain),
        "drafts_accepted": stood,
        "deviations": two_samples(drafted, plain),
    }


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else TEXTS
    with tempfile.TemporaryDirectory() as scratch:
        found = {"texts": number, "tiny": of_tiny(Path(scratch), number)}
        found["demo"] = of_demo(Path(scratch), number)
    text = json.dumps(found, indent=1)
    (HERE / "data" / "sampling_distribution.json").write_text(text + "\n")
