"""A life of one artifact in the dry run: load, prompts, steps, interrupts, misuse.

    cuda_scenario.py ARTIFACT FACTS.json

Run by test_cuda_runtime.py through dryrun.run_script; recordings go into its report, what is
no CUDA call into FACTS.json.
"""

import json
import sys
import threading
from pathlib import Path

import dryrun
import ml_dtypes
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cuda_puppet import Puppet  # noqa: E402

from runtime.errors import RunError  # noqa: E402
from runtime.graph_lines import graph_lines  # noqa: E402
from runtime.load import load  # noqa: E402
from runtime.sampling import SamplingOptions  # noqa: E402

facts: dict[str, object] = {}


def refusal(action) -> str:
    try:
        action()
    except RunError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def in_thread(action) -> None:
    worker = threading.Thread(target=action)
    worker.start()
    worker.join()


folder, facts_path = Path(sys.argv[1]), Path(sys.argv[2])
announced: list[str] = []
with dryrun.recording("load"):
    loaded = load(folder, progress=announced.append)
facts["announced"] = announced
facts["memory"] = loaded.memory.to_json()
facts["states"] = {name: str(slot.state) for name, slot in loaded.slots.items()}
buffers, slots = loaded.buffers, loaded.slots
facts["after load"] = {
    name: not buffers.read(name).astype(np.float32).any() for name in ("length", "ids", "best")
}

for name in ("decode", "verify", "draft"):
    with dryrun.recording(f"eager {name}"):
        slots[name].run_eagerly()
    facts[f"on host {name}"] = slots[name]._session.on_host()

# buffers: types, pieces, what is sent twice
wide = np.arange(np.prod(buffers.declared("logits").shape)).astype(np.float32)
wide = wide.reshape(buffers.declared("logits").shape)
kind = np.dtype(
    ml_dtypes.bfloat16 if loaded.manifest.target.dtype == "bfloat16" else "float16"
)
buffers.write("logits", (wide % 97).astype(kind))
facts["logits kept"] = bool((buffers.read("logits") == (wide % 97).astype(kind)).all())
key = next(name for name in loaded.manifest.buffers if name.endswith(".key"))
rows = np.ones(buffers.declared(key).shape, kind)
buffers.write(key, rows)
with dryrun.recording("reset"):
    buffers.reset()
facts["reset keeps caches"] = bool((buffers.read(key) == rows).all())
facts["reset clears logits"] = not buffers.read("logits").astype(np.float32).any()
buffers.write("length", np.array([5], np.int32))
with dryrun.recording("kept"), buffers.kept(["length", "ids"]):
    buffers.write("length", np.array([9], np.int32))
facts["kept"] = int(buffers.read("length")[0])
facts["misfit"] = refusal(lambda: buffers.write("ids", np.zeros((1, 99), np.int64)))
facts["mistype"] = refusal(lambda: buffers.write("ids", np.zeros((1, 1), np.int32)))

# the decoding loop
puppet = Puppet(loaded)
decoder = puppet.decoder
with dryrun.recording("prefill"):
    decoder.prefill([1, 2, 3, 4, 5])
with dryrun.recording("first mtp step"):
    decoder.step()
puppet.accepted = 1
with dryrun.recording("mtp step"):
    decoder.step()
with dryrun.recording("mtp step with fewer drafts"):
    decoder.step(1)
with dryrun.recording("decode step"):
    decoder.step(0)
with dryrun.recording("20 steps"):
    for number in range(20):
        decoder.step(0 if number % 3 == 0 else 2)

facts["catch-ups"] = slots["catch_up"].counters.runs
plain = decoder.generate([1, 2, 3], 9, k=0, stop_ids=())
next(plain)
with dryrun.recording("plain step"):
    next(plain)

drawn = SamplingOptions(temperature=0.8, top_p=0.9, presence_penalty=0.5, seed=3)
with dryrun.recording("sampled prompt"):
    decoder.prefill([1, 2, 3, 4], sampling=drawn)
decoder.step()
with dryrun.recording("sampled step"):
    decoder.step()
sampled = [slots[f"{name}_sampled"] for name in ("decode", "verify")]
facts["sampled states"] = [str(slot.state) for slot in sampled]
facts["sampled on host"] = [slot.load()._session.on_host() for slot in sampled]
plain = decoder.generate([1, 2, 3], 9, k=0, stop_ids=(), sampling=SamplingOptions(seed=1))
next(plain)
with dryrun.recording("sampled decode"):
    next(plain)

with dryrun.recording("another prompt"):
    facts["tokens"] = [
        token for step in decoder.generate([3] * 150, 40, stop_ids=()) for token in step.tokens
    ]
facts["lengths"] = puppet.lengths[-30:]
facts["chunks"] = decoder.stats.prefills

for name in ("draft", "verify"):  # an interrupt inside a step, then a new prompt
    decoder.prefill([1, 2, 3])
    puppet.interrupt = name
    try:
        decoder.step(2)
    except KeyboardInterrupt:
        facts[f"lost after {name}"] = decoder.sequence is None
    with dryrun.recording(f"after an interrupt of {name}"):
        decoder.prefill([1, 2])
        decoder.step(2)
facts["lines"] = graph_lines(slots)
facts["stats"] = decoder.stats.to_json()["graphs"]

# misuse
messages: list[str] = []
in_thread(lambda: messages.append(refusal(slots["decode"].run)))
facts["another thread"] = messages[0]
facts["captured twice"] = refusal(slots["decode"].capture)
facts["another shape"] = refusal(lambda: slots["verify"].run(99))
address = buffers._addresses["length"]
buffers._addresses["length"] = address + 4096
facts["moved"] = refusal(slots["decode"].run)
buffers._addresses["length"] = address
facts["lines after misuse"] = graph_lines(slots)

loaded.close()
loaded.close()
facts["closed"] = [refusal(slots["decode"].run), refusal(lambda: buffers.read("ids"))]
facts_path.write_text(json.dumps(facts))
