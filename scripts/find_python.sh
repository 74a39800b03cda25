#!/bin/sh
# Prints the command that makes a virtual environment with Python 3.12 or newer when a folder is
# appended to it; exits 1 with one sentence on standard error when this machine has none.
set -eu

# A name on PATH proves nothing: version managers leave shims that fail, and some distributions
# ship Python without the modules that make an environment. So each candidate is run.
usable='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))'

for name in python3.14 python3.13 python3.12 python3; do
    if "$name" -c "$usable" >/dev/null 2>&1; then
        echo "$name -m venv"
        exit 0
    fi
done

if uv --version >/dev/null 2>&1; then
    echo "uv venv --quiet --allow-existing --python 3.12"
    exit 0
fi

echo "No Python 3.12 or newer that can make a virtual environment was found (tried python3.14," \
    "python3.13, python3.12, python3 and uv): install Python 3.12 (on Debian and Ubuntu with" \
    "python3-venv) or uv, then run the same command again." >&2
exit 1
