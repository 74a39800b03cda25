#!/bin/sh
# Installs Chromium and its driver from the distribution's packages, for the tests of report pages.
# Where that is impossible it says why, and those tests are skipped.
set -eu

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    exit 0
fi
skipped() {
    echo "no browser: $1; the tests of report pages will be skipped" >&2
    exit 0
}
command -v apt-get >/dev/null || skipped "this distribution has no apt-get"
root=
if [ "$(id -u)" != 0 ]; then
    root="sudo -n"
    $root true 2>/dev/null || skipped "installing packages needs root"
fi
echo "Installing chromium and chromium-driver"
export DEBIAN_FRONTEND=noninteractive
$root apt-get -qq update >/dev/null || skipped "the package lists cannot be read"
$root apt-get -qq install --yes --no-install-recommends chromium chromium-driver >/dev/null ||
    skipped "apt-get cannot install chromium and chromium-driver"
