#!/usr/bin/env bash
# Compares docs/kernels/roofline.md with what it is made of, or writes it: --write.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
unset TRITON_INTERPRET
export PYTHONPATH="$here:$here/..${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m gpu_bench.roofline "$@"
