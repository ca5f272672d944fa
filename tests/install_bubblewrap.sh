#!/usr/bin/env bash
# bubblewrap from Debian or Ubuntu for tests/unit/scoring/sandbox, where it is not installed yet.
set -euo pipefail
command -v bwrap >/dev/null && exit 0
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "error: tests/unit/scoring/sandbox needs bubblewrap, which only root can install here, with apt-get: install the package" \
        "bubblewrap" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null
