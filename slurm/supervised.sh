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
set -a # what follows is exported
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
# Runs the job's own part, on its first node: any Python from 3.9, no package is needed.
[[ -x $PROJECT_DIR/.venv-actor/bin/python ]] && : "${BATCH_PYTHON:=.venv-actor/bin/python}"
: "${BATCH_PYTHON:=python3}"
# ------------------------------------------------------------------------------------------------------------

unset PYTHONSAFEPATH # -m finds the package in this folder
[[ -f $PROJECT_DIR/trainers/train_sft.py ]] && cd "$PROJECT_DIR" && exec $BATCH_PYTHON -m nemo_style_rlhf.launch.slurm_job supervised "$@"
echo "error: PROJECT_DIR=$PROJECT_DIR is not the repository: submit from its root, or set PROJECT_DIR" >&2
exit 2
