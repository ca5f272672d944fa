#!/usr/bin/env bash
# Slurm from Debian or Ubuntu for tests/cluster, where it is not installed yet. Nothing is started.
set -euo pipefail
command -v munged slurmctld slurmd sbatch >/dev/null && exit 0
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "error: tests/cluster needs Slurm (slurmctld, slurmd, munged), which only root can install here, with apt-get:" \
        "install the packages slurm-wlm, slurm-client and munge" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurm-wlm slurm-client munge >/dev/null
