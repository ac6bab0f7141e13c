"""What cannot be captured, or not be loaded, in the dry run.

    cuda_refusals.py ARTIFACT FACTS.json

ARTIFACT's decode graph has control flow, which a CUDA graph cannot hold.
"""

import json
import logging
import sys
from pathlib import Path

import dryrun

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cuda_puppet import Puppet  # noqa: E402

import runtime.cuda_load as cuda_load  # noqa: E402
from runtime.cuda_driver import CudaDriver  # noqa: E402
from runtime.errors import RunError, SlotError  # noqa: E402
from runtime.graph_lines import graph_lines  # noqa: E402
from runtime.load import load  # noqa: E402
from runtime.session import Session  # noqa: E402

facts: dict[str, object] = {}
warnings: list[str] = []


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            warnings.append(record.getMessage())


logging.getLogger("runtime").addHandler(Listener())
folder, facts_path = Path(sys.argv[1]), Path(sys.argv[2])

# refused when it is loaded
loaded = load(folder)
facts["warnings"] = list(warnings)
facts["states"] = {name: str(slot.state) for name, slot in loaded.slots.items()}
puppet = Puppet(loaded)
puppet.decoder.prefill([1, 2, 3])
with dryrun.recording("decode step"):
    puppet.decoder.step(0)
puppet.decoder.step(0)
with dryrun.recording("mtp step"):
    puppet.decoder.step()
facts["lines"] = graph_lines(loaded.slots)
facts["warnings later"] = list(warnings)
loaded.close()

# refused in the middle of the first run
warnings.clear()
plain_run = Session.run


def failing(self, binding, *, eager=False):
    if self.name == "verify" and not eager:
        raise SlotError("the verify graph failed") from RuntimeError("CUDA failure 900")
    plain_run(self, binding, eager=eager)


Session.run = failing
loaded = load(folder)
facts["warnings of a failed capture"] = list(warnings)
puppet = Puppet(loaded)
puppet.decoder.prefill([1, 2, 3])
puppet.decoder.step()
facts["lines of a failed capture"] = graph_lines(loaded.slots)


def lost(self, binding, *, eager=False):
    if self.name == "draft" and not eager:
        raise SlotError("the draft graph failed")
    plain_run(self, binding, eager=eager)


Session.run = lost  # a replay that fails
try:
    puppet.decoder.step()
except SlotError:
    puppet.decoder.prefill([1])
    puppet.decoder.step()
facts["lines of a failed replay"] = graph_lines(loaded.slots)
loaded.close()
Session.run = plain_run


def refusal(**settings) -> str:
    kept = {name: getattr(cuda_load, name) for name in settings}
    vars(cuda_load).update(settings)
    try:
        load(folder).close()
    except RunError as e:
        return f"{type(e).__name__}: {e}"
    finally:
        vars(cuda_load).update(kept)
    return ""


options = cuda_load.PROVIDER_OPTIONS
facts["unknown option"] = refusal(PROVIDER_OPTIONS={**options, "no_such_option": "1"})
facts["strays"] = refusal(ON_HOST=frozenset({"Cast", "Add"}))
facts["small capacity"] = refusal(MIN_CAPACITY=10_000)
with dryrun.recording("after refusals"):
    loaded = load(folder)
    driver = loaded.buffers._driver
    free = driver.memory()[0]
    try:
        driver.allocate(1 << 50, "a test")
    except RunError as e:
        facts["too large"] = f"{type(e).__name__}: {e}"
    facts["kept nothing"] = driver.memory()[0] == free
    loaded.close()
free, total = CudaDriver().memory()
facts["bytes left behind"] = total - free
facts_path.write_text(json.dumps(facts))
