"""The product on a real model in seconds: the trained checkpoint beside this file.

Builds it, decodes a few prompts with and without MTP on the CPU, and compares the tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts import Target
from export.build import Progress, build
from export.options import BuildOptions
from export.sources import read_source

__all__ = ["CHECKPOINT", "DemoReport", "DemoRun", "render", "show"]

CHECKPOINT = Path(__file__).parent / "tiny-hybrid-mtp"
CAPACITY = 4096
SHOWN = 70
"""Characters of a prompt or an output that are shown."""
PROMPTS = (
    'def read_json(path):\n    with open(path, encoding="utf-8") as f:\n        return json.',
    "import os\nimport sys\n\n\ndef main(argv):\n    parser = argparse.",
    "class Cache:\n    def __init__(self, size):\n        self.size = size\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """One prompt, decoded both ways."""

    prompt: str
    text: str
    """What MTP decoding wrote."""
    same_tokens: bool
    tokens: int
    greedy_forwards: int
    mtp_forwards: int
    greedy_seconds: float
    mtp_seconds: float
    positions: tuple[tuple[int, int], ...]
    """By draft position: tried, accepted."""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All prompts."""

    k: int
    runs: tuple[DemoRun, ...]
    kept: Path | None

    @property
    def same_tokens(self) -> bool:
        """Whether MTP changed no token of any prompt."""
        return all(run.same_tokens for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        runs = [{name: getattr(run, name) for name in run.__slots__} for run in self.runs]
        return {"k": self.k, "same_tokens": self.same_tokens, "runs": runs}


def show(
    *,
    k: int,
    prompts: Sequence[str] | None,
    max_new_tokens: int,
    keep: Path | None,
    progress: Progress,
) -> DemoReport:
    """Build the demo artifact and decode `prompts` with it.

    Args:
        k: Drafts a step.
        prompts: Texts to continue; built-in ones where None.
        max_new_tokens: Tokens to write for each.
        keep: Folder to leave the artifact in; a temporary one where None.
        progress: Told how far it is.

    Raises:
        ExportError: The build failed, or `keep` is in use.
        RunError: The artifact does not run.
    """
    options = BuildOptions(
        k=k, capacity=CAPACITY, prefill_rows=512, target=Target("cpu", "float32")
    )
    with tempfile.TemporaryDirectory(prefix="onnx-mtp-") as scratch:
        folder = keep or Path(scratch) / "artifact"
        build(read_source(CHECKPOINT), folder, options, run_check=False, progress=progress)
        runs = _decode(folder, prompts or PROMPTS, k, max_new_tokens, progress)
    return DemoReport(k, runs, keep)


def _decode(
    folder: Path, prompts: Sequence[str], k: int, max_new_tokens: int, progress: Progress
) -> tuple[DemoRun, ...]:
    from runtime.decode import Decoder
    from runtime.tokenizer import Tokenizer

    runs = []
    with Decoder.open(folder) as decoder:
        tokenizer = Tokenizer.of(folder, decoder.manifest)
        assert tokenizer is not None  # the demo checkpoint has one
        for number, prompt in enumerate(prompts):
            ids = tokenizer.encode(prompt)
            progress("decode", number, len(prompts))
            both = []
            for drafts in (0, k):
                steps = decoder.generate(ids, max_new_tokens, k=drafts, stop_ids=())
                tokens = [token for step in steps for token in step.tokens]
                both.append((tokens, decoder.stats))
            (greedy, plain), (tokens, mtp) = both
            runs.append(
                DemoRun(
                    prompt=prompt,
                    text=tokenizer.decode(tokens),
                    same_tokens=tokens == greedy,
                    tokens=len(tokens),
                    greedy_forwards=plain.steps,
                    mtp_forwards=mtp.steps,
                    greedy_seconds=plain.decode_seconds,
                    mtp_seconds=mtp.decode_seconds,
                    positions=tuple((tried, stood) for tried, stood in mtp.positions),
                )
            )
    return tuple(runs)


def render(report: DemoReport) -> str:
    """The report for a terminal."""
    lines = []
    for run in report.runs:
        lines.append(f"prompt  {_line(run.prompt, -1)!r}")
        lines.append(f"wrote   {_line(run.text, 0)!r} .. ({run.tokens} tokens)")
        lines.append(
            f"        without MTP {run.greedy_forwards} target forwards in "
            f"{run.greedy_seconds:.2f} s; with MTP (k = {report.k}) {run.mtp_forwards} in "
            f"{run.mtp_seconds:.2f} s"
        )
        stood = ", ".join(f"{100 * a / t:.0f} %" for t, a in run.positions if t)
        lines.append(f"        drafts accepted by position: {stood or 'none were made'}")
        lines.append(f"        tokens {'agree' if run.same_tokens else 'DIFFER'}")
    greedy = sum(run.greedy_forwards for run in report.runs)
    mtp = sum(run.mtp_forwards for run in report.runs)
    verdict = "Every token agrees" if report.same_tokens else "TOKENS DIFFER"
    saved = f", {greedy / mtp:.2f} times fewer" if mtp else ""  # the prefill gives one token
    lines.append(f"{verdict}: {greedy} target forwards without MTP, {mtp} with it{saved}.")
    if report.kept is not None:
        lines.append(f"The artifact is in {report.kept}: mtp-run generate {report.kept}")
    return "\n".join(lines)


def _line(text: str, number: int) -> str:
    """One line of a text, short enough for a terminal."""
    lines = text.splitlines() or [""]
    line = lines[number].strip()
    return line if len(line) <= SHOWN else line[: SHOWN - 3] + "..."
