#!/usr/bin/env bash
# Checks and times the Triton kernels on a Hopper GPU, in at most 8 minutes. Needs torch >= 2.11 (a CUDA build),
# Triton >= 3.6, numpy and this repository: no Ray, no network. Triton itself compiles a C module before its first launch:
# it needs a C compiler (gcc or clang, or what CC names), Python.h (Debian: python3-dev) and a folder for it, which is
# TRITON_CACHE_DIR, or ~/.triton, or a temporary one where that cannot be written to.
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
cache="${TRITON_CACHE_DIR:-${TRITON_HOME:-$(echo ~)}/.triton/cache}"
if [ "$limit" != 0 ] && ! { mkdir -p "$cache" && [ -w "$cache" ]; } 2> /dev/null; then
    TRITON_CACHE_DIR="$(mktemp -d)"
    export TRITON_CACHE_DIR
    echo "$cache cannot be written to: Triton's cache is $TRITON_CACHE_DIR" >&2
fi
export PYTHONPATH="$here:$root/kernels:$root/tests:$root/ops:$root${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after=5 "$limit" "${PYTHON:-python3}" -m gpu_bench "$@"
