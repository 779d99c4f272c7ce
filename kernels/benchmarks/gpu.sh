#!/usr/bin/env bash
# Checks and times the Triton kernels on a Hopper GPU, in at most 8 minutes. Needs torch >= 2.11 (a CUDA build),
# Triton >= 3.6 and this repository: no Ray, no network, nothing to install.
#
#   kernels/benchmarks/gpu.sh [--output FOLDER] [--seconds N] [--resume]
#   kernels/benchmarks/gpu.sh --dry-run      the script's own test: tiny shapes under Triton's interpreter, no GPU
#
# What is found is written at once: stopped at any moment, the next run with --resume goes on behind it. The model end to
# end also needs what the engine imports (pydantic, psutil, safetensors, grpcio, ...), the cluster Ray too; without that
# such a part is left out, and said to be. PYTHON names the interpreter. To publish a result: copy gpu.json to
# kernels/benchmarks/measured.json and run `kernels/benchmarks/roofline.sh --write`.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
unset TRITON_INTERPRET
limit=480
for argument in "$@"; do
    if [ "$argument" = --dry-run ]; then
        export TRITON_INTERPRET=1
        limit=0  # none
    fi
done
export PYTHONPATH="$here:$root/kernels:$root/tests:$root/ops:$root${PYTHONPATH:+:$PYTHONPATH}"
exec timeout "$limit" "${PYTHON:-python3}" -m gpu_bench "$@"
