#!/usr/bin/env bash
# Make a virtual environment from a complete lock file, then install this package into it, editable.
# Usage: scripts/setup_env.sh ENV_FOLDER LOCK_FILE
# Does nothing when the environment already matches. PYTHON names the interpreter to build it with.
set -euo pipefail
cd "$(dirname "$0")/.."

env_folder=$1
lock_file=$2
# Where PyTorch publishes its CPU builds; asked only when the configured index has none.
torch_index=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "needs Python 3.11, for which $lock_file is made; tried: ${PYTHON:-python3.11, python3}." \
        "Install it (Debian: apt-get install python3.11-venv) or run: make setup PYTHON=/path/to/python3.11"
}

works() { "$env_folder/bin/python" -m pip --version >/dev/null 2>&1; }

make_environment() {
    local python
    if [ -e "$env_folder" ] && ! works; then
        say "$env_folder is broken: its Python or its pip does not start. Building it anew."
        rm -rf "$env_folder"
    fi
    if [ ! -e "$env_folder" ]; then
        python=$(find_python)
        if ! "$python" -m venv "$env_folder"; then
            rm -rf "$env_folder"
            die "$python cannot make virtual environments (Debian: apt-get install python3.11-venv)"
        fi
    fi
}

# vLLM's CPU build loads libnuma, which small images lack.
need_libnuma() {
    if "$env_folder/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
        return
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing libnuma1, which vLLM's CPU build loads"
        { apt-get update && apt-get install -y libnuma1; } >/dev/null || die "apt-get install libnuma1 failed"
    else
        die "vLLM's CPU build needs libnuma.so.1 (Debian: apt-get install libnuma1)"
    fi
}

# -qq leaves only errors: pip warns of every package that a local index does not carry.
pip_install() { "$env_folder/bin/python" -m pip install -qq --no-deps "$@"; }

install_lock() {
    local torch
    say "installing $(grep -c == "$lock_file") packages of $lock_file into $env_folder (2 to 5 minutes)"
    torch=$(grep '^torch==' "$lock_file")
    pip_install "$torch" 2>/dev/null ||
        pip_install --index-url "$torch_index" "$torch" ||
        die "cannot install $torch: neither the configured package index nor $torch_index has it"
    pip_install -r "$lock_file" || die "cannot install $lock_file"
}

digest() { cat "$@" | sha256sum | cut -d' ' -f1; }

# Runs a step unless its stamp holds the digest of the step's inputs.
once() {
    local stamp="$env_folder/.stamp-$1" wanted=$2
    shift 2
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        "$@"
        echo "$wanted" >"$stamp"
    fi
}

install_package() {
    pip_install --no-build-isolation -e . || die "cannot install the package itself"
    say "$env_folder is ready"
}

make_environment
need_libnuma
once lock "$(digest "$lock_file")" install_lock
once package "$(digest "$lock_file" setup.cfg pyproject.toml build_startup_hook.py; pwd)" install_package
