#!/usr/bin/env bash
# Checks the GPU kernels' numbers on this machine's card and times them beside cuDNN and PyTorch.
#
#   benchmarks/gpu.sh                        sets up .venv from requirements-gpu.txt, then measures
#   benchmarks/gpu.sh --torch_python=PATH    also PyTorch, from an interpreter that has it
#   TORCH_PYTHON=PATH benchmarks/gpu.sh      the same
#   benchmarks/gpu.sh --dry_run              the parts that need no GPU
#
# Under 10 minutes on an H100 or H200; the table is saved in runs/bench/gpu.md with each time.
# PyTorch is not installed here, its CUDA libraries would displace those of JAX. Without it the
# columns of SDPA and FlexAttention, the peer of two targets, stay empty. It goes where you like:
#
#   python3 -m venv ~/torch && ~/torch/bin/pip install torch      then PATH is ~/torch/bin/python
#
# PYTHON=PATH runs an interpreter that is set up already, instead of .venv.
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
exec timeout 600 "$PYTHON" -m benchmarks.gpu ${TORCH_PYTHON:+--torch_python="$TORCH_PYTHON"} "$@"
