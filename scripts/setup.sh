#!/bin/sh
# setup.sh REQUIREMENTS [VENV]: makes VENV, by default .venv, when it is missing or broken and
# installs REQUIREMENTS there at the versions of constraints.txt. Does nothing when that was done
# before with the same files.
set -eu
cd "$(dirname "$0")/.."

requirements=$1
venv=${2:-.venv}
python=$venv/bin/python
stamp=$venv/$requirements.installed
# Present while an installation runs. One that was cut short can leave packages that pip takes for
# complete, so an environment with this file is made anew.
unfinished=$venv/unfinished

# Contents and not times: a fresh checkout or a copy gives every file a new time.
wanted=$(cat requirements.txt "$requirements" constraints.txt | cksum)

venv_runs() {
    [ ! -e "$unfinished" ] &&
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if ! venv_runs; then
    maker=$(scripts/find_python.sh)
    echo "Making $venv: $maker $venv"
    rm -rf "$venv"
    mkdir "$venv"
    touch "$unfinished"
    $maker "$venv" # a command and its arguments: split on purpose
elif [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

# An environment made by uv has no pip of its own.
if "$python" -m pip --version >/dev/null 2>&1; then
    set -- "$python" -m pip install
else
    set -- uv pip install --python "$python"
fi
echo "Installing $requirements into $venv (about a minute the first time)"
touch "$unfinished"
"$@" --quiet --requirement "$requirements" --constraint constraints.txt
echo "$wanted" >"$stamp"
rm "$unfinished"
