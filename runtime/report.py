"""A generation's figures: as a table, as lines, as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.answer import Answer
from runtime.cost import DraftPolicy
from runtime.decode import Decoder
from runtime.graph_lines import graph_lines
from runtime.sampling import SamplingOptions
from runtime.state import Finish

__all__ = ["ENDINGS", "figures", "generation_json", "print_figures", "turn_json"]

INTERRUPTED = "interrupted"

ENDINGS = {
    Finish.STOP: "at a stop token",
    Finish.LENGTH: "at --max-new-tokens",
    Finish.CAPACITY: "because the caches are full; build an artifact with a larger capacity",
    None: "because it was interrupted",
}
"""Why a generation ended, in words."""


def figures(decoder: Decoder, k: int, finish: Finish | None) -> list[tuple[str, str]]:
    """What is worth knowing of the last generation, as names and values."""
    stats = decoder.stats
    seconds = {name: spent for name, spent in stats.seconds.items() if spent}
    rows = [
        ("ended", ENDINGS[finish]),
        ("prompt", _prompt(decoder)),
        ("output", _output(decoder)),
        ("target forwards", _forwards(decoder)),
    ]
    if decoder.sampling is not None:
        rows.append(("sampling", _sampling(decoder.sampling)))
    if k:
        rows.append(("drafts accepted", _acceptance(stats.positions)))
    if len(stats.proposers) > 1:
        rows.append(("drafts by source", _proposers(stats.proposers)))
    if decoder.policy is not None and decoder.policy.measured:
        rows.append(("drafting", _policy(decoder.policy)))
    spent = ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())
    lines = (line.partition(": ") for line in graph_lines(decoder.loaded.slots))
    captured = [(label, counters) for label, _, counters in lines]
    return [
        *rows,
        ("time", spent or "none"),
        ("graphs", _slots(decoder)),
        *captured,
        ("kernels", str(decoder.loaded.kernels)),
    ]


def _prompt(decoder: Decoder) -> str:
    stats = decoder.stats
    held = f", {stats.reused} of them held already" if stats.reused else ""
    return f"{stats.prompt_tokens} tokens{held} in {stats.seconds['prefill']:.3f} s"


def _output(decoder: Decoder) -> str:
    stats = decoder.stats
    rate = stats.tokens_per_second
    return f"{stats.tokens} tokens" + ("" if rate is None else f", {rate:.1f} tokens/s")


def _forwards(decoder: Decoder) -> str:
    stats = decoder.stats
    each = stats.tokens_per_step
    return f"{stats.steps}" + ("" if each is None else f", {each:.2f} tokens each")


def _acceptance(positions: list[list[int]]) -> str:
    """By position, of those drafts whose earlier ones stood."""
    shares = [
        f"{position}: {accepted}/{tried} ({accepted / tried:.0%})"
        for position, (tried, accepted) in enumerate(positions, 1)
        if tried
    ]
    return ", ".join(shares) or "none was made"


def _sampling(options: SamplingOptions) -> str:
    """Those options that change something, and the seed."""
    plain = SamplingOptions()
    shown = [
        f"{name.replace('_', ' ')} {value:g}"
        for name, value in options.to_json().items()
        if name == "temperature" or (name != "seed" and value != getattr(plain, name))
    ]
    return ", ".join([*shown, f"seed {options.seed}"])


def _proposers(proposers: dict[str, list[int]]) -> str:
    return ", ".join(
        f"{source} {accepted}/{drafted} in {steps} steps"
        for source, (steps, drafted, accepted) in proposers.items()
    )


def _policy(policy: DraftPolicy) -> str:
    """The measured times, and how many tokens a step with drafts must yield to pay."""
    costs = policy.costs
    times = ", ".join(f"{name} {1000 * s:.2f} ms" for name, s in costs.to_json().items())
    needed = costs.of("head") / costs.decode
    return f"{times}; pays from {needed:.2f} tokens a step on"


def _slots(decoder: Decoder) -> str:
    """Runs by graph; captures and what became of them, where the device has any."""
    parts = []
    for name, slot in decoder.loaded.slots.items():
        counters = slot.counters
        part = f"{name} {counters.runs} runs"
        if counters.captures:
            part += f" ({counters.captures} captures, {counters.replays} replays)"
        if counters.fallbacks or counters.invalidations:
            part += (
                f" ({counters.fallbacks} fallbacks, {counters.invalidations} invalidations)"
            )
        parts.append(part)
    captured = any(slot.counters.captures for slot in decoder.loaded.slots.values())
    return ", ".join(parts) + ("" if captured else "; nothing captured on this provider")


def print_figures(rows: list[tuple[str, str]], console: Console) -> None:
    """A table on a terminal, else one line a figure."""
    if not console.is_terminal:
        for name, value in rows:
            console.print(f"{name}: {value}", highlight=False, markup=False, soft_wrap=True)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    console.print(table)


def generation_json(
    decoder: Decoder, *, k: int, ids: list[int], text: str | None, finish: Finish | None
) -> dict[str, Any]:
    """A generation as plain JSON values."""
    policy = decoder.policy
    return {
        "artifact": decoder.loaded.folder.name,
        "k": k,
        "ids": ids,
        "text": text,
        "finish": INTERRUPTED if finish is None else str(finish),
        "kernels": decoder.loaded.kernels.to_json(),
        "stats": decoder.stats.to_json(),
        "sampling": None if decoder.sampling is None else decoder.sampling.to_json(),
        "drafting": policy.to_json() if policy is not None and policy.measured else None,
        "slots": {
            name: {"state": str(slot.state), **slot.counters.to_json()}
            for name, slot in decoder.loaded.slots.items()
        },
    }


def turn_json(decoder: Decoder, answer: Answer, *, k: int) -> dict[str, Any]:
    """A turn of a conversation as plain JSON values."""
    values = generation_json(
        decoder, k=k, ids=answer.ids, text=answer.text, finish=answer.finish
    )
    return {key: values[key] for key in ("text", "ids", "finish", "stats")}
