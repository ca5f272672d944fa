#!/usr/bin/env bash
# PPO as one heterogeneous Slurm job: component 0 is the critic server, component 1 the actor, component 2, if there is
# one, its generation engines.
#
#   export CRITIC_ARGS="model.path=$REWARD_MODEL" ACTOR_ARGS="model.path=$POLICY data.train_path=$PROMPTS"
#   sbatch slurm/ppo_hetjob.sh
#
# The job ends with the actor: its exit code is the actor's, or that of the critic if it died first. Before the time
# limit it commits a checkpoint and requeues itself. More: docs/cluster.md

# --- What Slurm is asked for --------------------------------------------------------------------------------
# Edit it here, or say it in sbatch's environment (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT,
# SBATCH_GPUS_PER_NODE, ...), or on its command line, where ":" separates the components:
#   export CRITIC_RANKS=8 ACTOR_RANKS=8
#   sbatch --partition=gpu --nodes=1 --gpus-per-node=8 : --nodes=4 --gpus-per-node=8 slurm/ppo_hetjob.sh
# Engines, 2 nodes with one on each GPU:
#   export ENGINES_PER_NODE=8 ACTOR_RANKS=8 SBATCH_GPUS_PER_NODE=8
#   sbatch --nodes=1 : --nodes=4 : --nodes=2 --exclusive --mem=0 slurm/ppo_hetjob.sh
#SBATCH --job-name=ppo
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
##SBATCH --partition=gpu
##SBATCH --account=alignment
##SBATCH --time=24:00:00
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
##SBATCH --gpus-per-node=8
#SBATCH hetjob
##SBATCH --partition=gpu
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
##SBATCH --gpus-per-node=8

# --- Site settings: the environment of sbatch overrides each of them ----------------------------------------
set -a # what follows is exported
# The repository, at the same path on every node.
: "${PROJECT_DIR:=$SLURM_SUBMIT_DIR}"
# Gets critic/ and actor/, the run.output_dir of each, and their logs. That of an earlier job continues it.
: "${OUTPUT_DIR:=outputs/$SLURM_JOB_NAME-$SLURM_JOB_ID}"
# Overrides of the two programs, quoted as in a shell; --config-name=... too. With algorithm=grpo or another without a critic the server
# needs value_model.enabled=false.
: "${CRITIC_ARGS:=}" "${ACTOR_ARGS:=}"
# Processes per node: one for each GPU.
: "${CRITIC_RANKS:=1}" "${ACTOR_RANKS:=1}" "${ENGINES_PER_NODE:=1}"
# GPUs of one engine: generation.tensor_parallel_size.
: "${GPUS_PER_ENGINE:=1}"
# Engines run as the actor does, in the next three settings too.
# Shell commands before the program: module load ..., export NCCL_...
: "${CRITIC_SETUP:=}" "${ACTOR_SETUP:=}"
# The interpreter, with what stands before it in a container: apptainer exec --nv server.sif python
: "${CRITIC_PYTHON:=.venv-server/bin/python}" "${ACTOR_PYTHON:=.venv-actor/bin/python}"
# More options of srun: --container-image=... --container-mounts=...
: "${CRITIC_SRUN:=}" "${ACTOR_SRUN:=}"
# Seconds from the server's SIGTERM to its SIGKILL.
: "${STOP_GRACE_S:=5}"
# Seconds before the time limit from which a checkpoint is no longer waited for.
: "${REQUEUE_MARGIN_S:=60}"
# Runs the job's own part, on its first node: any Python from 3.9, no package is needed.
[[ -x $PROJECT_DIR/.venv-actor/bin/python ]] && : "${BATCH_PYTHON:=.venv-actor/bin/python}"
: "${BATCH_PYTHON:=python3}"
# ------------------------------------------------------------------------------------------------------------

unset PYTHONSAFEPATH # -m finds the package in this folder
[[ -f $PROJECT_DIR/servers/serve_ppo_critic.py ]] && cd "$PROJECT_DIR" && exec $BATCH_PYTHON -m nemo_style_rlhf.launch.slurm_job ppo
echo "error: PROJECT_DIR=$PROJECT_DIR is not the repository: submit from its root, or set PROJECT_DIR" >&2
exit 2
