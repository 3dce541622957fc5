#!/usr/bin/env bash
# Checks vToken on a machine with one NVIDIA GPU, then times it there: under six minutes once .venv is made.
#   scripts/gpu_check.sh                      everything; a table, and check.json and check.txt under OUT/gpu
#   scripts/gpu_check.sh --step decode        one step (may be repeated); partial.json and partial.txt
#   scripts/gpu_check.sh --dry-run            walks through every step on the CPU; measures and writes nothing
#   OUT=bench/results                         where the folder gpu lies
# Exit codes: 0 good, 1 a check failed or a step overran, 2 no GPU (says what to do).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly PYTHON=.venv/bin/python RESULTS=${OUT:-bench/results}/gpu

die() { # what is missing, what to do
    printf 'gpu_check: %s\ngpu_check: remedy: %s\n' "$1" "$2" >&2
    exit 2
}

has_cuda_torch() {
    "$PYTHON" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null
}

make_environment() {
    nvidia-smi -L >/dev/null 2>&1 ||
        die "nvidia-smi finds no GPU" "run this on a machine with an NVIDIA GPU and its driver, or give --dry-run"
    has_cuda_torch && return
    VTOKEN_DEVICE=cuda bash scripts/setup.sh || die "no environment for CUDA" "mend what setup says, and run this again"
    has_cuda_torch || die ".venv holds PyTorch for the CPU, which pip keeps" "rm -r .venv, and run this again"
}

if [[ " $* " != *" --dry-run "* && " $* " != *" --help "* && " $* " != *" -h "* ]]; then
    make_environment
elif [[ ! -x $PYTHON ]]; then
    die "no environment .venv" "bash scripts/setup.sh"
fi
exec "$PYTHON" -m vtoken_bench.gpu_check --out "$RESULTS" "$@"
