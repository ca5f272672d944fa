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
# ------------------------------------------------------------------------------------------------------------

set -uo pipefail
PREEMPTED=75 # the actor's exit code once SIGUSR1 has made it commit and end: PREEMPTED_EXIT in launch/preemption.py

say() { echo "$(date '+%F %T') $*"; }
refuse() { echo "error: $*" >&2; exit 2; }

[[ -n ${SLURM_JOB_ID_HET_GROUP_1:-} ]] ||
    refuse "this is no heterogeneous Slurm job: start it with sbatch slurm/ppo_hetjob.sh"
cd "$PROJECT_DIR" && [[ -f servers/serve_ppo_critic.py ]] ||
    refuse "PROJECT_DIR=$PROJECT_DIR is not the repository: submit from its root, or set PROJECT_DIR"
[[ -n $CRITIC_ARGS ]] || refuse "CRITIC_ARGS is empty: export CRITIC_ARGS=\"model.path=REWARD_MODEL\" before sbatch"
[[ -n $ACTOR_ARGS ]] ||
    refuse "ACTOR_ARGS is empty: export ACTOR_ARGS=\"model.path=POLICY data.train_path=PROMPTS\" before sbatch"
[[ $OUTPUT_DIR != *[\'\\$%]* ]] || # Hydra and srun would read them
    refuse "OUTPUT_DIR=$OUTPUT_DIR holds one of ' \\ \$ %: give a folder without"
mkdir -p "$OUTPUT_DIR" || refuse "OUTPUT_DIR=$OUTPUT_DIR cannot be made: give a folder that every node can write to"
# xargs splits as a shell does but expands nothing: brackets and braces belong to the overrides.
for name in CRITIC_ARGS ACTOR_ARGS; do
    xargs -r printf '%s\0' <<<"${!name}" >/dev/null 2>&1 ||
        refuse "$name cannot be split into words: close each quote on the line that opens it, and put a \\ before one that is text"
done
mapfile -d '' -t critic_args < <(xargs -r printf '%s\0' <<<"$CRITIC_ARGS")
mapfile -d '' -t actor_args < <(xargs -r printf '%s\0' <<<"$ACTOR_ARGS")

# Of this job alone, and never on a command line.
NSR_CRITIC_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export NSR_CRITIC_TOKEN

deadline=
on_time_limit() {
    local end
    end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e | head -n 1)
    say "SIGUSR1, the time limit is $end: the actor is told to commit a checkpoint"
    deadline=$(($(date -d "${end:-unknown}" +%s 2>/dev/null || echo 9999999999) - REQUEUE_MARGIN_S))
}
trap on_time_limit USR1

running() { [[ -n $1 ]] && kill -0 "$1" 2>/dev/null; }
pause() { sleep "$1" & wait $!; } # a plain sleep would hold traps up

end_components() {
    kill -TERM "$actor" 2>/dev/null # SIGKILL for its tasks; first, or it would take the server's end for a fault
    [[ -z $engines ]] || kill -TERM "$engines" 2>/dev/null
    local tries=$((5 * STOP_GRACE_S))
    kill -USR2 "$critic" 2>/dev/null # SIGTERM for the server: as_task
    while running "$critic" && ((tries-- > 0)); do pause 0.2; done
    kill -TERM "$critic" 2>/dev/null
    for tries in {1..15}; do running "$critic" || running "$actor" || running "$engines" || break; pause 0.2; done
}

# Runs on the nodes, once per task: SIGNAL SETUP RANKS_PER_NODE MASTER_ADDR MASTER_PORT COMMAND...
# Slurm signals every process of a task, and srun makes SIGTERM a SIGKILL. So the job sends SIGUSR2, which only this shell
# heeds: it sends SIGNAL to the program alone, not to Triton or a worker of its.
as_task() {
    trap '' USR2 # while it loads modules, or starts
    eval "$2"
    set +e # which may have been set there: a wait that a trap ends is no failure
    if ((SLURM_NTASKS > 1)); then
        export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$3
        export MASTER_ADDR=$4 MASTER_PORT=$5
    fi
    (($3 == 1)) || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + $3 - 1) / $3))} # each would start one per core
    (trap '' USR1 USR2 && exec "${@:6}") & # SIGUSR1 would end an actor that is still being imported
    local program=$!
    trap "kill -$1 $program" USR2
    trap : TERM # the program has it, too
    while kill -0 $program 2>/dev/null; do wait $program; done # a trap ends a wait
    wait $program
    exit $?
}
task=(bash -c "$(declare -f as_task); as_task \"\$@\"" task)

# Runs on the nodes, once per engine: SETUP FOLDER COMMAND_THAT_PRINTS_THE_ADDRESS ENGINES_PER_NODE GPUS COMMAND...
# An engine is started again, but not for ever if it has exit code 2: its settings are wrong, or it found no memory.
as_engine() {
    eval "$1"
    set +e
    local devices=() first=$((SLURM_LOCALID * $5)) host code mistakes=0
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
        IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
    elif command -v nvidia-smi >/dev/null; then
        mapfile -t devices < <(nvidia-smi --query-gpu=index --format=csv,noheader)
    fi
    if ((${#devices[@]} > 0)); then
        if ((first + $5 > ${#devices[@]})); then
            echo "error: ENGINES_PER_NODE=$4 with GPUS_PER_ENGINE=$5, but $(hostname) shows ${#devices[@]} GPUs"
            exit 2
        fi
        CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${devices[*]:first:$5}")
        export CUDA_VISIBLE_DEVICES
    fi
    (($4 == 1)) || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + $4 - 1) / $4))}
    read -r host _ < <(eval "$3")
    until [[ -f $2/this_run.yaml ]]; do sleep 0.5; done # the actor describes its engines there
    while true; do
        "${@:6}" "server.host=$host" "server.ready_file='$2/engine-$SLURM_PROCID.json'"
        code=$?
        ((code != 2)) || ((++mistakes))
        ((code != 0 && mistakes < 3)) || exit "$code"
        echo "engine $SLURM_PROCID ended with exit code $code and is started again"
        sleep 1
    done
}

# A task is a whole process with its threads: it may use every core and GPU of its node.
step=(srun --export=ALL --overcommit --cpu-bind=none --kill-on-bad-exit=1 --open-mode=append)
critic_step=("${step[@]}" --het-group=0 --job-name=critic $CRITIC_SRUN)
actor_step=("${step[@]}" --het-group=1 --job-name=actor $ACTOR_SRUN)
engine_step=("${step[@]}" --kill-on-bad-exit=0 --het-group=2 --job-name=engines $ACTOR_SRUN)
engine_nodes=${SLURM_JOB_NUM_NODES_HET_GROUP_2:-0} engines=
critic_nodes=$SLURM_JOB_NUM_NODES_HET_GROUP_0 actor_nodes=$SLURM_JOB_NUM_NODES_HET_GROUP_1

# Run on a component's first node: the address that leads to it from the node $1, and two free ports.
where='
import socket, sys
from nemo_style_rlhf.launch.ports import free_ports
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
    route.connect((sys.argv[1], 9))
    print(route.getsockname()[0], *free_ports(2))
'
# NODELIST: where Slurm itself reaches its first node; no resolver knows the names of cloud nodes and emulated ones.
first_address() {
    scontrol show node "$(scontrol show hostnames "$1" | head -n 1)" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'
}
actor_address=$(first_address "$SLURM_JOB_NODELIST_HET_GROUP_1")
critic_address=$(first_address "$SLURM_JOB_NODELIST_HET_GROUP_0")
read -r host port critic_master_port < <("${critic_step[@]}" --nodes=1 --ntasks=1 \
    "${task[@]}" TERM "$CRITIC_SETUP" 1 - - $CRITIC_PYTHON -c "$where" "$actor_address" | tail -n 1)
[[ -n ${critic_master_port:-} ]] || refuse "CRITIC_PYTHON=$CRITIC_PYTHON did not run on the critic's node: see above"
read -r actor_host _ actor_master_port < <("${actor_step[@]}" --nodes=1 --ntasks=1 \
    "${task[@]}" USR1 "$ACTOR_SETUP" 1 - - $ACTOR_PYTHON -c "$where" "$critic_address" | tail -n 1)
[[ -n ${actor_master_port:-} ]] || refuse "ACTOR_PYTHON=$ACTOR_PYTHON did not run on the actor's node: see above"

names=IP:$host engine_folder=$OUTPUT_DIR/actor/engines engine_args=()
if ((engine_nodes > 0)); then
    printf -v find_address '%q ' $ACTOR_PYTHON -c "$where" "$actor_address"
    mapfile -t addresses < <("${engine_step[@]}" --nodes="$engine_nodes" --ntasks="$engine_nodes" --ntasks-per-node=1 \
        "${task[@]}" TERM "$ACTOR_SETUP" 1 - - bash -c "$find_address" | awk '/^[0-9.]+ [0-9]+ [0-9]+$/ {print "IP:" $1}')
    ((${#addresses[@]} == engine_nodes)) || refuse "ACTOR_PYTHON=$ACTOR_PYTHON did not run on the engines' nodes: see above"
    names=$(IFS=, && echo "$names,${addresses[*]}")
    rm -rf "$engine_folder" # that of an earlier start
fi

# The job's own certificate, which names these addresses; only the job's owner can enter its folder, which goes with the job.
tls=$OUTPUT_DIR/tls-$SLURM_JOB_ID
trap 'rm -rf "$tls"' EXIT
rm -rf "$tls" && mkdir -m 700 "$tls" || refuse "$tls, for the job's certificate, cannot be made"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=ppo-$SLURM_JOB_ID" \
    -addext "subjectAltName=$names" -keyout "$tls/server.key" -out "$tls/server.crt" 2>"$tls/log" ||
    refuse "the job's certificate was not made: $(cat "$tls/log")"

if ((engine_nodes > 0)); then
    engine_args=("generation.engines.count=$((engine_nodes * ENGINES_PER_NODE))" generation.engines.launch=false
        "generation.engines.tls.ca='$tls/server.crt'")
    say "engines on $SLURM_JOB_NODELIST_HET_GROUP_2, $ENGINES_PER_NODE per node"
fi
say "critic on $SLURM_JOB_NODELIST_HET_GROUP_0 at $host:$port, actor on $SLURM_JOB_NODELIST_HET_GROUP_1, in $OUTPUT_DIR;" \
    "processes per node: critic $CRITIC_RANKS, actor $ACTOR_RANKS"
"${critic_step[@]}" --output="$OUTPUT_DIR/critic.log" \
    --nodes="$critic_nodes" --ntasks=$((critic_nodes * CRITIC_RANKS)) --ntasks-per-node="$CRITIC_RANKS" \
    "${task[@]}" TERM "$CRITIC_SETUP" "$CRITIC_RANKS" "$host" "$critic_master_port" \
    $CRITIC_PYTHON servers/serve_ppo_critic.py "run.output_dir='$OUTPUT_DIR/critic'" "${critic_args[@]}" \
    "server.host=$host" "server.port=$port" "server.tls.certificate='$tls/server.crt'" "server.tls.key='$tls/server.key'" &
critic=$!
"${actor_step[@]}" --output="$OUTPUT_DIR/actor.log" \
    --nodes="$actor_nodes" --ntasks=$((actor_nodes * ACTOR_RANKS)) --ntasks-per-node="$ACTOR_RANKS" \
    "${task[@]}" USR1 "$ACTOR_SETUP" "$ACTOR_RANKS" "$actor_host" "$actor_master_port" \
    $ACTOR_PYTHON trainers/train_ppo_actor.py "run.output_dir='$OUTPUT_DIR/actor'" "${actor_args[@]}" \
    "remote_critic_rm.host=$host" "remote_critic_rm.port=$port" "remote_critic_rm.tls.ca='$tls/server.crt'" \
    "${engine_args[@]}" &
actor=$!
if ((engine_nodes > 0)); then
    "${engine_step[@]}" --output="$OUTPUT_DIR/engines.log" --nodes="$engine_nodes" \
        --ntasks=$((engine_nodes * ENGINES_PER_NODE)) --ntasks-per-node="$ENGINES_PER_NODE" \
        bash -c "$(declare -f as_engine); as_engine \"\$@\"" engine "$ACTOR_SETUP" "$engine_folder" "$find_address" \
        "$ENGINES_PER_NODE" "$GPUS_PER_ENGINE" \
        $ACTOR_PYTHON servers/serve_engine.py "--config-dir=$engine_folder" --config-name=this_run server.port=0 \
        "server.tls.certificate='$tls/server.crt'" "server.tls.key='$tls/server.key'" &
    engines=$!
fi
trap 'say "SIGTERM"; end_components; exit 143' TERM

all_running() { running "$critic" && running "$actor" && { [[ -z $engines ]] || running "$engines"; }; }
while all_running; do
    pause 1
    if [[ -n $deadline ]]; then
        kill -USR2 "$actor" 2>/dev/null # SIGUSR1 for the program; again, as one may come too early to be heeded
        (($(date +%s) < deadline)) || break
    fi
done
if all_running; then
    say "no checkpoint within the time: the job goes on from the last one"
    first= code=$PREEMPTED
elif running "$actor"; then
    running "$critic" && first=engines || first=critic
    wait "${!first}" && code=1 || code=$?
else
    first=actor
    wait "$actor"
    code=$?
    # Of several ranks the first to end has srun kill the others, and a signal is what srun then reports.
    [[ -z $deadline ]] || ((code < 128)) || code=$PREEMPTED
fi
[[ -n $first ]] && say "the $first ended with exit code $code"
end_components
case $code in
0) wait "$critic" || say "the critic ended with exit code $? after the run was complete" ;;
"$PREEMPTED")
    say "requeueing"
    trap - TERM
    scontrol requeue "$SLURM_JOB_ID" && while true; do pause 60; done # Slurm ends this script: one that ends itself may count as failed
    say "the job could not be requeued: submit it again with OUTPUT_DIR=$OUTPUT_DIR, the run goes on"
    ;;
*) tail -n 20 "$OUTPUT_DIR/$first.log" ;;
esac
exit "$code"
