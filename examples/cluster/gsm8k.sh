#!/bin/bash
# A run of arl, made by `arl launch`.
#
#   bash gsm8k.sh         starts everything, and ends everything when the run ends; Ctrl-C writes a checkpoint first
#   bash gsm8k.sh stop    does what Ctrl-C does, from elsewhere, and ends what an earlier start may have left
#
# The first hosts train, the first of them also runs the script; the other hosts run servers. Each process on a host
# ends with its connection to this script. To log out meanwhile, start it in tmux or screen.
# shellcheck disable=SC2329  # functions are called by their names, on other machines
set -euo pipefail

# What runs.
NAME=gsm8k
WORKDIR=/shared/arl
RUN_DIR=/shared/runs/gsm8k
MODEL=/shared/models/Qwen3-8B
PYTHON=/shared/arl/.venv/bin/python
INTERFACE=''
TRAINERS=1
SERVER_KIND=sglang
SERVERS_PER_MACHINE=8
GPUS_PER_SERVER=1
SERVER_PYTHON=/shared/sglang/bin/python
SERVER_ARGUMENTS=()
RESTARTS=5
STARTUP_S=1800
NOTICE_S=110
COMMAND=(python examples/agents/math_agent.py --dataset openai/gsm8k --train.dtype bfloat16 --steps 500)
FLAGS=(
  --model "$MODEL" --run_dir "$RUN_DIR" --checkpoint.notice_s "$NOTICE_S" --engine.kind sglang
  --weights.transport disk --weights.directory "$RUN_DIR/weights"
  --train.num_ranks 8
  --train.device cuda
)
LOGS=$RUN_DIR/logs/launch
KEYS=$RUN_DIR-keys-$(date +%s)  # for this start alone, and for your eyes alone
SENT="NAME WORKDIR RUN_DIR MODEL PYTHON INTERFACE TRAINERS SERVER_KIND SERVERS_PER_MACHINE GPUS_PER_SERVER
  SERVER_PYTHON SERVER_ARGUMENTS RESTARTS STARTUP_S NOTICE_S COMMAND KEYS LOGS PLACE"

environment() {  # of every process, on every machine
  export PATH="${PYTHON%/*}:$PATH"
  if [ -n "$INTERFACE" ]; then export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE; fi
  [ -x "$PYTHON" ] || die "$HOSTNAME has no $PYTHON"
  cd "$WORKDIR"
}

key_variables() {  # of the training script alone
  export ARL_SERVER_API_KEY ARL_MIRROR_API_KEY
  ARL_SERVER_API_KEY=$(<"$KEYS/server")
  ARL_MIRROR_API_KEY=$(<"$KEYS/mirror")
}

MACHINES=(gpu-1 gpu-2 gpu-3)
SSH_OPTIONS=()
PLACE=/tmp/arl-$NAME
ALIVE=$(mktemp --dry-run)
mkfifo "$ALIVE"
exec {LIFE}<>"$ALIVE"  # this script alone keeps it open

on() {  # until the function ends there, or this script does: its standard input is what the host watches
  local machine=$1 text quote="'" quoted="'\\''"
  shift
  if ((BASH_SUBSHELL > 0)); then exec {LIFE}>&-; fi
  text=$(there guarded "$@")
  # In a session of its own, so that Ctrl-C does not end it.
  setsid ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 "${SSH_OPTIONS[@]}" "$machine" \
    "bash -c '${text//$quote/$quoted}'" <"$ALIVE" {LIFE}>&-
}

guarded() {  # on a host: runs a function in a process group of its own, which ends with the connection
  local work watch code=0
  make_place
  set -m
  { "$@"; } </dev/null &
  work=$!
  { cat >/dev/null; end_group "$work"; } <&0 &
  watch=$!
  set +m
  since "$work" >"$PLACE/$work.pid"
  wait "$work" || code=$?
  kill -TERM -- "-$work" 2>/dev/null || true  # what it started would outlive the connection, or keep it open
  rm -f "$PLACE/$work.pid"
  rmdir "$PLACE" 2>/dev/null || true
  kill -KILL -- "-$watch" 2>/dev/null || true
  exit "$code"
}

since() { cut -d ' ' -f 22 "/proc/$1/stat" 2>/dev/null || true; }  # when a process began: its id may be used again

end_group() {  # ends a process group: the training script may write its checkpoint
  local left
  kill -TERM -- "-$1" 2>/dev/null || return 0
  for ((left = NOTICE_S + 15; left > 0; left--)); do
    kill -0 -- "-$1" 2>/dev/null || return 0
    sleep 1
  done
  kill -KILL -- "-$1"
}

leftovers() {  # the process groups of other starts that still run on a host
  local file pid
  for file in "$PLACE"/*.pid; do
    pid=$(basename "$file" .pid)
    if [ "$pid" != "$1" ] && [ -s "$file" ] && [ "$(since "$pid")" = "$(<"$file")" ]; then echo "$pid"; fi
  done
}

may_start() {
  local self=$BASHPID
  [ -z "$(leftovers "$self")" ] || die "an earlier start still runs on $HOSTNAME; end it: bash $NAME.sh stop"
}

end_leftovers() {
  local pid self=$BASHPID
  for pid in $(leftovers "$self"); do end_group "$pid"; done
  rm -rf "$PLACE"
}

tell() {  # tell SIGNAL: on the first host
  if [ -s "$KEYS/train.pid" ]; then kill -s "$1" "$(<"$KEYS/train.pid")" 2>/dev/null || true; fi
}

notify() { on "${MACHINES[0]}" tell "$1"; }

let_go() {  # ends everything on the hosts, and its connections
  on "${MACHINES[0]}" rm -rf "$KEYS" || true
  exec {LIFE}>&-
  rm -f "$ALIVE"
  wait
}

say() { echo "$(date '+%F %T') $NAME: $*" >&2; }
die() { say "$*"; exit 1; }

# ---- What happens on a machine: `on MACHINE FUNCTION ARGUMENTS` calls one of these functions there. ----

there() {  # prints the bash that calls a function on another machine
  # shellcheck disable=SC2086
  declare -p $SENT
  declare -f
  echo "set -euo pipefail"
  echo "environment"
  printf '%q ' "$@"
}

make_place() {  # for files of processes of this machine
  (umask 077 && mkdir -p "$PLACE")
  [ -O "$PLACE" ] || die "$PLACE on $HOSTNAME belongs to somebody else"
}

check() {  # prints this machine's address and versions
  may_start
  "$PYTHON" -m arl.cluster.on_node check ${INTERFACE:+--interface "$INTERFACE"} "$@"
}

is_training() {  # whether a process holds run_dir
  local code=0
  flock --shared --nonblock --conflict-exit-code 75 "$RUN_DIR/run.lock" true || code=$?
  ((code == 75))
}

predecessor() {  # waits while another process trains in run_dir, such as that of a requeued job which is still ending
  local waited
  mkdir -p "$LOGS"
  for ((waited = 0; waited < 1800; waited += 2)); do
    is_training || return 0
    ((waited % 60)) || say "waits for the end of the run that holds $RUN_DIR/run.lock: $(<"$RUN_DIR/run.lock")"
    sleep 2
  done
  die "that run has not ended: end it, or choose another run_dir"
}

new_keys() {  # what servers, mirrors and Ray ask for; never on a command line
  local what
  umask 077
  mkdir -p "$KEYS"
  for what in server mirror ray; do
    "$PYTHON" -c 'import secrets; print(secrets.token_hex(32))' >"$KEYS/$what"
  done
  echo "api-key: $(<"$KEYS/server")" >"$KEYS/sglang.yaml"
}

can_train() {  # ends the start early where the training script could not begin
  key_variables
  type -P "${COMMAND[0]}" >/dev/null || die "$HOSTNAME has no program ${COMMAND[0]}, with which command begins"
}

keep() {  # keep NAME COMMAND...: starts a command again when it ends
  local name=$1 times=0 began code
  shift
  while true; do
    began=$SECONDS code=0
    "$@" >&2 || code=$?
    if ((SECONDS - began > 600)); then times=0; fi
    if ((times >= RESTARTS)); then die "$name on $HOSTNAME ended with code $code, and is given up"; fi
    times=$((times + 1))
    say "$name on $HOSTNAME ended with code $code; it starts again ($times of $RESTARTS)"
    sleep "$times"
  done
}

servers() {  # prints the ports of this machine's servers, and of the mirror; then runs them
  local i ports gpus running=()
  exec 2>>"$LOGS/servers-$HOSTNAME.log"
  exec {ports_of}< <(exec "$PYTHON" -m arl.cluster.on_node ports $((SERVERS_PER_MACHINE + 1)))
  read -r -a ports -u "$ports_of"
  echo "${ports[*]}"
  IFS=, read -r -a gpus <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((SERVERS_PER_MACHINE * GPUS_PER_SERVER)))}"
  for ((i = 0; i < SERVERS_PER_MACHINE; i++)); do
    if ((GPUS_PER_SERVER > 0)); then
      export CUDA_VISIBLE_DEVICES
      CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${gpus[*]:i * GPUS_PER_SERVER:GPUS_PER_SERVER}")
    fi
    keep "server $i" server "${ports[i]}" &
    running+=($!)
  done
  if [ "$(type -t mirror)" = function ]; then keep "the mirror" mirror "${ports[i]}" & fi
  wait "${running[@]}"
}

server() {  # one server, at this port of all interfaces; SGLang takes its key from a file
  "$SERVER_PYTHON" -m sglang.launch_server --config "$KEYS/sglang.yaml" --model-path "$MODEL" \
    --host 0.0.0.0 --port "$1" --tp-size $((GPUS_PER_SERVER > 0 ? GPUS_PER_SERVER : 1)) "${SERVER_ARGUMENTS[@]}"
}

train() {  # train FLAGS...: the training script
  key_variables
  rm -f "$RUN_DIR/servers.txt"  # which names servers of an earlier start
  echo "$BASHPID" >"$KEYS/train.pid"
  exec "${COMMAND[@]}" "$@"
}

end_training() {  # on the first host: as Ctrl-C
  local left host pid
  is_training || return 0
  host=$(sed -n 's/.*"host": "\([^"]*\)".*/\1/p' "$RUN_DIR/run.lock")
  pid=$(sed -n 's/.*"pid": \([0-9]*\).*/\1/p' "$RUN_DIR/run.lock")
  if [ "$host" != "$HOSTNAME" ]; then say "leaves the run on $host, which holds $RUN_DIR"; return 0; fi
  kill -TERM "$pid" || true  # it may just have ended
  for ((left = NOTICE_S + 15; left > 0; left--)); do
    is_training || return 0
    sleep 1
  done
}

if [ "${1:-start}" = stop ]; then
  on "${MACHINES[0]}" end_training
  for machine in "${MACHINES[@]}"; do on "$machine" end_leftovers; done
  rm -f "$ALIVE"
  exit
fi
# ---- What happens here. ----

notice() {  # the signal that announces the end goes to the training script, which writes a checkpoint
  say "SIG$1: the run is told to end"
  asked=$1
  notify "$1"
}

end() {
  trap - EXIT
  rm -rf "$HERE"
  let_go
}

first_line() {  # first_line FILE PID WHAT: the first line that process PID prints into FILE
  until [ "$(wc -l <"$1")" -gt 0 ]; do
    kill -0 "$2" 2>/dev/null || die "$3 has ended: see $LOGS"
    sleep 0.2
  done
  head -n 1 "$1"
}

asked=
HERE=$(mktemp -d)
trap end EXIT
trap 'notice TERM' TERM
trap 'notice USR1' USR1
trap 'notice INT' INT

on "${MACHINES[0]}" predecessor &
wait $!

# Every machine must have the same packages. Its address, and then what it has, is in the line that it prints.
for i in "${!MACHINES[@]}"; do
  of_servers=() other=${MACHINES[i == 0]}
  if ((i >= TRAINERS)) && [ "$SERVER_KIND" = sglang ]; then of_servers=(--sglang "$SERVER_PYTHON"); fi
  on "${MACHINES[i]}" check --towards "$other" "${of_servers[@]}" >"$HERE/check-$i" 2>&1 &
done
wait
ADDRESSES=() bad=0
for i in "${!MACHINES[@]}"; do
  ready='' address='' versions=''
  read -r ready address versions < <(grep '^ready ' "$HERE/check-$i") || true
  has=${versions%,sglang=*}
  if [ -z "$ready" ]; then
    why=$(grep -v '^srun: ' "$HERE/check-$i" | tail -n 1) || true
    say "${MACHINES[i]} cannot take part: ${why:-$(<"$HERE/check-$i")}" && bad=1
  elif [ "$has" != "${expected:=$has}" ]; then
    say "${MACHINES[i]} has $has, but ${MACHINES[0]} has $expected" && bad=1
  fi
  ADDRESSES+=("$address")
done
((bad == 0)) || die "nothing was started"

on "${MACHINES[0]}" new_keys
on "${MACHINES[0]}" can_train

URLS=() MIRRORS='' STEPS=()
for i in "${!MACHINES[@]}"; do
  ((i >= TRAINERS)) || continue
  on "${MACHINES[i]}" servers >"$HERE/servers-$i" &
  STEPS[i]=$!
done
for i in "${!STEPS[@]}"; do
  line=$(first_line "$HERE/servers-$i" "${STEPS[i]}" "the start of servers on ${MACHINES[i]}")
  read -r -a ports <<<"$line"
  for port in "${ports[@]:0:SERVERS_PER_MACHINE}"; do
    URLS+=("http://${ADDRESSES[i]}:$port")
    MIRRORS+=", \"http://${ADDRESSES[i]}:$port\": \"http://${ADDRESSES[i]}:${ports[SERVERS_PER_MACHINE]}\""
  done
done
say "starts ${#URLS[@]} servers; their logs are in $LOGS"

for url in "${URLS[@]}"; do FLAGS+=(--engine.addresses "$url"); done

on "${MACHINES[0]}" "$PYTHON" -m arl.cluster.on_node wait "$STARTUP_S" "${URLS[@]}" &
waiting=$!
while kill -0 "$waiting" 2>/dev/null; do
  for step in "${STEPS[@]}"; do
    kill -0 "$step" 2>/dev/null || die "servers or Ray have ended on one of the machines: see $LOGS"
  done
  [ -z "$asked" ] || die "ends before it has trained, because of SIG$asked"
  sleep 0.5
done
wait "$waiting" || die "not all servers answer: see $LOGS"

say "trains; look at it with: arl view $RUN_DIR"
on "${MACHINES[0]}" train "${FLAGS[@]}" &
training=$!
while true; do  # a signal ends a wait
  code=0
  wait "$training" || code=$?
  kill -0 "$training" 2>/dev/null || break
done
last=0
wait "$training" 2>/dev/null || last=$?
if ((last != 127)); then code=$last; fi
say "the training script ended with code $code; $RUN_DIR/END.json says why"
exit "$code"
