#!/usr/bin/env bash
# A supervised stage as a Slurm job, torchrun on every node:
#
#   sbatch slurm/supervised.sh trainers/train_sft.py run.output_dir=outputs/sft model.path=$BASE data.train_path=$ROWS
#
# Before the time limit it requeues itself; it goes on from its last checkpoint (checkpoint.save_interval).
# More: docs/cluster.md

# --- What Slurm is asked for: edit it, or say it in sbatch's environment or on its command line 
#SBATCH --job-name=supervised
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
##SBATCH --partition=gpu
##SBATCH --account=alignment
##SBATCH --time=24:00:00
##SBATCH --gpus-per-node=8

# --- Site settings: the environment of sbatch overrides each of them ----------------------------------------
# The repository, at the same path on every node.
: "${PROJECT_DIR:=$SLURM_SUBMIT_DIR}"
# Processes per node: one for each GPU.
: "${STAGE_RANKS:=1}"
# Shell commands before the program: module load ..., export NCCL_...
: "${STAGE_SETUP:=}"
# The interpreter, with what stands before it in a container: apptainer exec --nv actor.sif python
: "${STAGE_PYTHON:=.venv-actor/bin/python}"
# More options of srun: --container-image=... --container-mounts=...
: "${STAGE_SRUN:=}"
# ------------------------------------------------------------------------------------------------------------

set -uo pipefail
refuse() { echo "error: $*" >&2; exit 2; }

cd "$PROJECT_DIR" && [[ -f trainers/train_sft.py ]] ||
    refuse "PROJECT_DIR=$PROJECT_DIR is not the repository: submit from its root, or set PROJECT_DIR"
[[ ${1:-} == trainers/*.py ]] || refuse "the first argument is '${1:-}': give a trainer, such as trainers/train_sft.py"

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
master=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
port=$((20000 + SLURM_JOB_ID % 10000)) # of this job, below the ports that the kernel hands out
# torchrun, not one task per rank: Lightning prefers its variables to Slurm's, which describe the job and not this run.
srun --export=ALL --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --overcommit --cpu-bind=none --kill-on-bad-exit=1 $STAGE_SRUN \
    bash -c 'eval "$1"; exec $2 -m torch.distributed.run --node-rank="$SLURM_NODEID" "${@:3}"' task "$STAGE_SETUP" "$STAGE_PYTHON" \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$STAGE_RANKS" --master-addr="$master" --master-port="$port" "$@" &
step=$!

requeue() {
    echo "$(date '+%F %T') SIGUSR1: the job is requeued and goes on from its last checkpoint"
    trap '' USR1
    kill -TERM "$step" 2>/dev/null # srun makes it SIGKILL for the ranks; checkpoints are written atomically
    wait "$step"
    scontrol requeue "$SLURM_JOB_ID" && while true; do sleep 60; done # Slurm ends this script: one that ends itself may count as failed
    echo "the job could not be requeued: submit it again, the run goes on"
    exit 75
}
trap requeue USR1

wait "$step"
