#!/usr/bin/env bash
# Compiles the kernels for Hopper, without a GPU, and compares with the committed table (or writes it: --write).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
unset TRITON_INTERPRET
export PYTHONPATH="$here:$here/..${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m gpu_bench.hopper_table "$@"
