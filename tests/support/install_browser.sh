#!/bin/sh
# The browser tests need Chromium and its driver; shellcheck checks exported scripts. Debian's packages, where they are missing.
set -eu
missing=
command -v chromium >/dev/null || missing="$missing chromium"
command -v chromedriver >/dev/null || missing="$missing chromium-driver"
command -v shellcheck >/dev/null || missing="$missing shellcheck"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "tests: install$missing with your package manager" >&2
  exit 1
fi
apt-get update -qq
# shellcheck disable=SC2086  # a list of package names
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null
