#!/usr/bin/env bash
# The JAX executor on the newest JAX, and compiled for an H100 that is not there: in an environment of its own,
# .venv-aot, for the newest JAX asks for a newer Python than the rest.
#   VTOKEN_AOT_PYTHON=python3.13   which interpreter (default: the first of python3.13, python3.12, pyenv's)
#   VTOKEN_AOT_TESTS=mosaic        of the package's tests only those of the Mosaic kernel in the interpreter
# Without such a Python, or where an index has not the packages, it says so and leaves with 0: there is nothing that it
# could check. Packages that are there and do not install are a failure.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly VENV=.venv-aot STAMP=.venv-aot/vtoken-aot.stamp LOG=.venv-aot/setup.log JAX=0.12.0.1 TRITON=3.9.0
readonly PYTHONS=${VTOKEN_AOT_PYTHON:-python3.13 python3.12 $HOME/.pyenv/versions/3.13*/bin/python $HOME/.pyenv/versions/3.12*/bin/python}

say() { printf 'aot-jax: %s\n' "$*"; }
skip() {
    say "skipped: $*"
    exit 0
}

find_python() {
    local candidate
    for candidate in $PYTHONS; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] < (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >>"$LOG" 2>&1; }

install_all() {
    "$1" -m venv --clear "$VENV" || return
    say "making $VENV with $("$VENV/bin/python" --version), JAX $JAX and its CUDA plugin; log in $LOG"
    pip_install --editable ".[jax,conformance]" "jax==$JAX" pytest pytest-xdist hypothesis || return
    # No card is used, so NVIDIA's libraries (3 GB) stay out; Triton's wheel brings the assembler.
    pip_install --no-deps "jax-cuda13-plugin==$JAX" "jax-cuda13-pjrt==$JAX" "triton==$TRITON" || return
    wanted >"$STAMP"
}

wanted() { cksum pyproject.toml scripts/aot_jax.sh; }

case ${VTOKEN_AOT_TESTS:=all} in
    all) tests=(jax_impl/tests) ;;
    mosaic) tests=(jax_impl/tests/test_compat.py jax_impl/tests/kernels/test_decode_mosaic.py) ;;
    *) say "failed: VTOKEN_AOT_TESTS=$VTOKEN_AOT_TESTS: give all or mosaic" && exit 2 ;;
esac
python=$(find_python) || skip "no Python 3.12 or newer with venv among: $PYTHONS"
if [[ ! -f $STAMP || $(<"$STAMP") != "$(wanted)" ]]; then
    if ! install_all "$python"; then
        lacking=$(grep -m 1 'No matching distribution found' "$LOG") && skip "a package is not available: $lacking"
        say "failed: $VENV is not made; the end of $LOG: $(tail -n 3 "$LOG")"
        exit 1
    fi
fi
began=$SECONDS
export JAX_PLATFORMS=cpu
"$VENV/bin/python" -m vtoken_jax.aot "$@"
"$VENV/bin/python" -m pytest -q -n 2 --dist worksteal "${tests[@]}"
say "done ($((SECONDS - began)) s)"
