#!/usr/bin/env bash
# Checks the GPU kernels' numbers on this machine's card and times them beside cuDNN and PyTorch.
#
#   benchmarks/gpu.sh                        sets up .venv from requirements-gpu.txt, then measures
#   benchmarks/gpu.sh --torch_python=PATH    also PyTorch, from an interpreter that has it
#   benchmarks/gpu.sh --dry_run              the parts that need no GPU
#
# Under 10 minutes on an H100 or H200. PYTHON=… uses an interpreter that is set up already.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -z "${PYTHON:-}" ]]; then
  requirements=requirements-gpu.txt
  [[ " $* " == *" --dry_run "* ]] && requirements=requirements.txt
  scripts/setup.sh "$requirements"
  PYTHON=.venv/bin/python
fi

# PyTorch needs its share of the card's memory.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
exec timeout 600 "$PYTHON" -m benchmarks.gpu "$@"
