#!/usr/bin/env bash
# Builds artifacts with random weights where it runs, and benches them:
#     bash tests/gpu/run_synthetic.sh OUT SIZE K CAPACITY WEIGHTS KS CONTEXTS [more options of mtp-run bench]
set -u
out=$1 size=$2 k=$3 capacity=$4 weights=$5 ks=$6 contexts=$7
shift 7
kernels=${KERNELS:-stock}
folder=/dev/shm/$size-$k-$weights-$kernels
[ -d "$folder" ] || python3 -m export build --synthetic "$size" -o "$folder" --target cuda \
  --weights "$weights" --kernels "$kernels" --k "$k" --capacity "$capacity"
python3 -m runtime bench "$folder" --k "$ks" --context "$contexts" --forced-acceptance 0.83 --json "$@" \
  >"$out/bench-$size-k$k-$weights-$kernels.json" && python3 - "$out/bench-$size-k$k-$weights-$kernels.json" <<'P'
import json, sys
r = json.load(open(sys.argv[1]))
for c in r["contexts"]:
    print(c["context"], "prefill", round(c["prefill_ms"], 1), "greedy", round(c["greedy_ms"], 3), round(c["greedy_tokens_per_second"], 1), "decode", round(c["decode_graph_ms"], 3))
    for m in c["mtp"]:
        print("  k", m["k"], *(f"{n} {m[n]:.3f}" for n in ("step_ms", "draft_ms", "verify_ms", "host_ms", "tokens_per_step", "tokens_per_second", "over_greedy")), m["positions"])
print(r["bandwidth_share"], r["copy_bytes_per_second"], r["memory"], r["graphs"])
P
