#!/usr/bin/env bash
# fetch_googletest.sh <folder>: unpacks the distribution's GoogleTest sources into <folder>/usr.
# Downloads only: nothing is installed, and where the system's package lists are missing or stale,
# lists of our own are fetched into <folder>. Needs no root.
set -euo pipefail
mkdir -p "$1"
cd "$1"
command -v apt-get dpkg-deb >/dev/null || { echo "no apt-get and dpkg-deb" >&2; exit 1; }

# apt drops its rights to a user who may not write here.
apt=(apt-get -qq -o APT::Sandbox::User= -o Acquire::Retries=3)
if ! "${apt[@]}" download googletest 2>/dev/null; then
  mkdir -p apt/state/lists/partial apt/cache/archives/partial
  apt+=(-o "Dir::State=$PWD/apt/state" -o "Dir::Cache=$PWD/apt/cache"
        -o Dir::State::status=/var/lib/dpkg/status)
  "${apt[@]}" update
  "${apt[@]}" download googletest
  rm -rf apt
fi
dpkg-deb --extract googletest_*.deb .
rm -f googletest_*.deb
