#!/usr/bin/env bash
# Checks and times the Triton kernels on a Hopper GPU, in at most 8 minutes. Needs torch >= 2.11 (a CUDA build),
# Triton >= 3.6, numpy and this repository: no Ray, no network, nothing to install.
#
#   kernels/benchmarks/gpu.sh [--output FOLDER] [--seconds N] [--resume]
#   kernels/benchmarks/gpu.sh --dry-run      the script's own test: tiny shapes under Triton's interpreter, no GPU
#
# What is found is written at once, to gpu.json and gpu.md in the folder (gpu-results): what fails, hangs or crashes is
# noted there and passed over, and a run with --resume keeps what an earlier one of the same code found. Only the cluster
# at the end needs pd-relay installed, Ray with it; without that it is left out, and said to be. PYTHON names the
# interpreter. To publish a result: copy gpu.json to kernels/benchmarks/measured.json and run
# `kernels/benchmarks/roofline.sh --write`.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
unset TRITON_INTERPRET
limit=475  # and what is killed then
for argument in "$@"; do
    if [ "$argument" = --dry-run ]; then
        export TRITON_INTERPRET=1
        limit=0  # none
    fi
done
export PYTHONPATH="$here:$root/kernels:$root/tests:$root/ops:$root${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after=5 "$limit" "${PYTHON:-python3}" -m gpu_bench "$@"
