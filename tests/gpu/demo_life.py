"""What one CUDA artifact of the demo checkpoint does on a card; see run_demo.py."""

from __future__ import annotations

import json
import resource
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import Severity, Target
from export.build import build
from export.demo import CHECKPOINT
from export.options import BuildOptions
from export.sources import read_source
from runtime.check_lossless import compare_with_greedy
from runtime.check_rows import check_rows
from runtime.decode import Decoder
from runtime.errors import SlotError
from runtime.graph_lines import graph_lines
from runtime.load import load

EXPECTED = Path(__file__).parents[1] / "data" / "oracle_acceptance.json"
CAPACITY, PREFILL_ROWS, CHUNK = 512, 64, 7
CAPTURED = ("decode", "verify", "draft")
ACCEPTANCE_POINTS = 2.0
"""Percentage points that acceptance may be away from the CPU's."""
WARM_STEPS = 500


def build_demo(folder: Path, provider: str, dtype: str, k: int) -> Path:
    options = BuildOptions(
        k=k, capacity=CAPACITY, prefill_rows=PREFILL_ROWS, target=Target(provider, dtype)
    )
    build(read_source(CHECKPOINT), folder, options, run_check=False)
    return folder


def expected() -> dict[str, Any]:
    return json.loads(EXPECTED.read_text())


class Life:
    """An open artifact; each method is one part and returns plain JSON values.

    A part's ``ok`` says whether it showed what it must.
    """

    def __init__(self, folder: Path) -> None:
        start = time.perf_counter()
        self.loaded = load(folder)
        self.load_seconds = time.perf_counter() - start
        self.decoder = Decoder(self.loaded)
        self.k = self.loaded.manifest.k
        self.cases = expected()["cases"]

    def opened(self) -> dict[str, Any]:
        memory = self.loaded.memory
        states = {name: str(slot.state) for name, slot in self.loaded.slots.items()}
        return {
            "ok": all(states[name] == "captured" for name in CAPTURED),
            "seconds": self.load_seconds,
            "states": states,
            "memory": None if memory is None else memory.to_json(),
        }

    def acceptance(self, prompts: int = 20) -> dict[str, Any]:
        """As the oracle counted it: whole rounds until 200 tokens are there."""
        count = expected()["new_tokens"]
        total, wanted = np.zeros((2, self.k, 2), np.int64)
        same, steps, seconds = 0, 0, 0.0
        for case in self.cases[:prompts]:
            start = time.perf_counter()
            tokens = list(self.decoder.prefill(case["ids"]).tokens)
            while len(tokens) < count:
                tokens += self.decoder.step().tokens
            seconds += time.perf_counter() - start
            steps += self.decoder.stats.steps
            same += tokens[:count] == case["tokens"][:count]
            for place, counted in enumerate(self.decoder.stats.positions):
                total[place] += counted
            for place, counted in enumerate(case["drafts"][str(self.k)]["positions"]):
                wanted[place] += counted
        shares, cpu = (
            [100 * float(stood) / float(max(tried, 1)) for tried, stood in counts]
            for counts in (total, wanted)
        )
        overall = 100 * float(total[:, 1].sum()) / float(total[:, 0].sum())
        overall_cpu = 100 * float(wanted[:, 1].sum()) / float(wanted[:, 0].sum())
        return {
            "ok": abs(overall - overall_cpu) <= ACCEPTANCE_POINTS,
            "percent": overall,
            "percent of the float32 oracle": overall_cpu,
            "by position": shares,
            "by position, oracle": cpu,
            "prompts with the oracle's tokens": f"{same} of {prompts}",
            "tokens a step": prompts * (count - 1) / steps,
            "ms a step, prompts included": 1e3 * seconds / steps,
        }

    def lossless(self, prompts: int = 20, count: int = 200) -> dict[str, Any]:
        """Greedy of the same card, draft and verify and decode in turn."""
        ties, real, tokens = [], [], 0
        for number, case in enumerate(self.cases[:prompts]):
            found = compare_with_greedy(self.decoder, case["ids"], count)
            tokens += found.tokens
            ties += [{"prompt": number, "text": str(t), "gap": t.gap} for t in found.ties]
            if found.real is not None:
                real.append({"prompt": number, "text": str(found.real), "gap": found.real.gap})
        return {"ok": not real, "tokens": tokens, "near ties": ties, "real": real}

    def chunks(self) -> dict[str, Any]:
        """A prompt in odd chunks: the length must reach each of them."""
        ids = (self.cases[0]["ids"] + self.cases[0]["tokens"])[:150]
        seen = []
        for chunk in (PREFILL_ROWS, CHUNK, 1):
            step = Decoder(self.loaded, chunk=chunk).prefill(ids)
            logits = self.loaded.buffers.read("logits", (self._vocab,)).astype(np.float64)
            seen.append((step.tokens[0], logits))
        apart = [float(np.abs(logits - seen[0][1]).max()) for _, logits in seen]
        scale = float(np.abs(seen[0][1]).max())
        return {
            "ok": max(apart) < 0.1 * scale,
            "first tokens": [token for token, _ in seen],
            "largest logit": scale,
            "apart": apart,
        }

    def rows(self) -> dict[str, Any]:
        """Verify against decode at every drafted and accepted count, padding poisoned."""
        findings = check_rows(self.decoder, self.cases[1]["ids"])
        return {
            "ok": not any(finding.severity is Severity.ERROR for finding in findings),
            "findings": [finding.to_json() for finding in findings],
        }

    def replay_is_eager(self) -> dict[str, Any]:
        """Bit for bit, on two inputs a slot, before and after the others have run."""
        differing: dict[str, list[str]] = {}
        for number in (2, 5):
            for name in CAPTURED:
                before = self._prepared(number)
                replayed = self._ran(before, name, eager=False)
                eager = self._ran(before, name, eager=True)
                for other in CAPTURED:
                    self._ran(self._prepared(number + 1), other, eager=False)
                again = self._ran(before, name, eager=False)
                for label, values in (("eager", eager), ("after others", again)):
                    wrong = [key for key in replayed if replayed[key] != values[key]]
                    if wrong:
                        differing[f"{name}, prompt {number}, {label}"] = wrong
                if replayed == {key: value.tobytes() for key, value in before.items()}:
                    differing[f"{name}, prompt {number}, no effect"] = [name]
        return {"ok": not differing, "differing buffers": differing}

    def endurance(self, steps: int, seconds: float) -> dict[str, Any]:
        """Many steps of both kinds over many prompts; `FiniteError` would end it."""
        driver = self.loaded.buffers._driver
        done, prompts, marks = 0, 0, []
        deadline = time.perf_counter() + seconds
        while done < steps and time.perf_counter() < deadline:
            self.decoder.prefill(self.cases[prompts % 20]["ids"])
            prompts += 1
            while done < steps:
                step = self.decoder.step(0 if done % 5 == 4 else self.k)
                done += 1
                if done in (WARM_STEPS, steps) or done % 5000 == 0:
                    marks.append((done, driver.memory()[0], _resident()))
                if step.finish is not None:
                    break
                if self.decoder.sequence.capacity - self.decoder.sequence.length < self.k + 2:
                    break
        marks.append((done, driver.memory()[0], _resident()))
        warm, last = marks[0], marks[-1]
        return {
            "ok": done >= steps and last[1] >= warm[1] and last[2] - warm[2] < 8 << 20,
            "steps": done,
            "prompts": prompts,
            "device bytes grown": warm[1] - last[1],
            "host bytes grown": last[2] - warm[2],
            "marks: steps, device bytes free, host bytes": marks,
        }

    def times(self, steps: int = 60) -> dict[str, Any]:
        """Milliseconds of a step: the small model is all launches, so this is the floor."""
        made = {}
        for label, k in (("decode", 0), ("mtp", self.k)):
            self.decoder.prefill(self.cases[3]["ids"])
            spent = []
            for _ in range(steps):
                start = time.perf_counter()
                self.decoder.step(k)
                spent.append(1e3 * (time.perf_counter() - start))
            made[label] = {"median ms": statistics.median(spent[5:]), "max ms": max(spent[5:])}
        return {"ok": True, **made}

    def counters(self) -> dict[str, Any]:
        """After everything else: one capture each, nothing fell back."""
        counters = {name: self.loaded.slots[name].counters.to_json() for name in CAPTURED}
        return {
            "ok": all(
                (c["captures"], c["fallbacks"], c["invalidations"]) == (1, 0, 0)
                and c["replays"] > 0
                for c in counters.values()
            ),
            "lines": graph_lines(self.loaded.slots),
            "counters": counters,
        }

    def other_thread(self) -> dict[str, Any]:
        """A run on another thread is refused before ONNX Runtime captures again."""
        messages: list[str] = []

        def run() -> None:
            try:
                self.loaded.slots["decode"].run()
            except SlotError as e:
                messages.append(str(e))

        worker = threading.Thread(target=run)
        worker.start()
        worker.join()
        return {"ok": len(messages) == 1, "message": messages}

    def closed(self) -> dict[str, Any]:
        """All device memory comes back but for what CUDA itself keeps."""
        driver = self.loaded.buffers._driver
        free = driver.memory()[0]
        held = self.loaded.buffers.total + self.loaded.memory.weights
        self.decoder.close()
        freed = driver.memory()[0] - free
        return {"ok": freed >= held // 2, "bytes held": held, "bytes freed": freed}

    @property
    def _vocab(self) -> int:
        return self.loaded.manifest.spec.vocab_size

    def _prepared(self, number: int) -> dict[str, np.ndarray]:
        """All buffers in the middle of a generation, right before a verify."""
        self.decoder.prefill(self.cases[number]["ids"])
        for _ in range(3):
            self.decoder.step()
        self.loaded.slots["draft"].run()
        # so that a draft that did nothing shows: it would leave these ids
        newest = self.loaded.buffers.read("ids", (1, 1))
        wrong = np.full((1, self.k + 1), newest[0, 0], np.int64)
        self.loaded.buffers.write("ids", wrong)
        count = np.array([self.k - number % 2 if self.k > 1 else 1], np.int32)
        self.loaded.buffers.write("draft_count", count)
        return {name: self.loaded.buffers.read(name) for name in self.loaded.manifest.buffers}

    def _ran(
        self, before: dict[str, np.ndarray], name: str, *, eager: bool
    ) -> dict[str, bytes]:
        """All buffers after one run from `before`, as bytes."""
        buffers, slot = self.loaded.buffers, self.loaded.slots[name]
        for key, values in before.items():
            buffers.write(key, values)
        run: Callable[[], None] = slot.run_eagerly if eager else slot.run
        run()
        return {key: buffers.read(key).tobytes() for key in before}


def _resident() -> int:
    """Bytes of this process in memory, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
