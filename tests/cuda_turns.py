"""Two turns of one artifact in the dry run, of which the second goes back to a kept state.

    cuda_turns.py ARTIFACT FACTS.json

Run by test_cuda_turns.py through dryrun.run_script.
"""

import json
import sys
from pathlib import Path

import dryrun
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cuda_puppet import Puppet  # noqa: E402

from runtime.load import load  # noqa: E402
from runtime.reuse import state_buffers  # noqa: E402

KEPT, NEW = 5, 3

folder, facts_path = Path(sys.argv[1]), Path(sys.argv[2])
loaded = load(folder)
puppet = Puppet(loaded)
decoder, buffers = puppet.decoder, loaded.buffers
names = state_buffers(loaded.manifest)
facts: dict[str, object] = {
    "sizes": [buffers.size(name) for name in names],
    "rows": loaded.manifest.rows,
}

decoder.prefill(range(8), reuse=True)
with dryrun.recording("keep"):
    decoder._feeder.kept.keep(range(8))
decoder.prefill(range(9), keep_at=KEPT)
held = {name: buffers.read(name) for name in names}
puppet.poke("length", np.array([KEPT], np.int32))
decoder._feeder.kept.close()
decoder._feeder.kept.keep(range(KEPT))
decoder.step()
for name in names:
    buffers.write(name, np.full_like(buffers.read(name), 3))
puppet.length = KEPT
with dryrun.recording("go back"):
    decoder.prefill([*range(KEPT), *[9] * NEW], reuse=True)
facts["reused"] = decoder.stats.reused
facts["restored"] = [
    name for name in names[:-1] if np.array_equal(buffers.read(name), held[name])
]
facts["names"] = list(names[:-1])

puppet.length = KEPT + NEW
puppet.poke("length", np.array([KEPT + NEW], np.int32))
live = decoder.sequence.fed
with dryrun.recording("go on"):
    decoder.prefill([*live, 1, 2], reuse=True)
facts["went on"] = decoder.stats.reused == len(live)
decoder.close()
facts_path.write_text(json.dumps(facts))
