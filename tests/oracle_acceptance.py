"""Write tests/data/oracle_acceptance.json: what the NumPy oracle drafts and accepts.

    python tests/oracle_acceptance.py            # about ten minutes on two cores

For each prompt of tests/prompts.py: 200 greedy tokens of the demo checkpoint in float32, and
for k = 1, 2, 3, 5 how often a draft was tried and stood, by position. The tests compare the
artifacts with it.
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "oracle"), str(HERE.parent)]

import tokenizers  # noqa: E402
from checkpoint import load_config, load_weights  # noqa: E402
from prompts import PROMPTS  # noqa: E402
from tiny_reference import MtpHead, TextModel, greedy, speculative  # noqa: E402

CHECKPOINT = HERE.parent / "export" / "demo" / "tiny-hybrid-mtp"
NEW_TOKENS = 200
KS = (1, 2, 3, 5)


def case(prompt: str) -> dict[str, object]:
    cfg, weights = load_config(CHECKPOINT), load_weights(CHECKPOINT)
    model = TextModel(cfg, weights)
    head = MtpHead(cfg, weights, model)
    ids = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode(prompt).ids
    tokens = greedy(model, ids, NEW_TOKENS)
    positions = {}
    for k in KS:
        got, stats = speculative(model, head, ids, NEW_TOKENS, k)
        if got != tokens:
            raise SystemExit(f"the oracle disagrees with itself at k = {k} on {prompt!r}")
        positions[str(k)] = {"rounds": stats.rounds, "positions": stats.per_position}
    return {"ids": ids, "tokens": tokens[len(ids) :], "drafts": positions}


if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        cases = list(pool.map(case, PROMPTS))
    text = json.dumps({"new_tokens": NEW_TOKENS, "cases": cases})
    (HERE / "data" / "oracle_acceptance.json").write_text(text + "\n")
