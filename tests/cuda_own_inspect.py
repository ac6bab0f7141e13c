"""What the CUDA provider makes of a graph with this project's operators, in the dry run.

    cuda_own_inspect.py GRAPH LIBRARY IN_PLACE.json

IN_PLACE maps outputs to the inputs whose buffers they share. The report is dryrun's.
"""

import json
import sys

import dryrun

path, library, in_place = sys.argv[1:]
options = dryrun.load().SessionOptions()
options.register_custom_ops_library(library)
with dryrun.session(path, {"enable_cuda_graph": "1"}, session_options=options) as dry:
    if dry.report.accepted:
        dry.bind(alias=json.loads(in_place))
        for graph_id in (-1, 1, 1):
            dry.run(graph_id)
