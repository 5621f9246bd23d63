"""The bash script that runs on machines without containers: what Slurm and ssh share.

It is put together of blocks, of which a description needs only some. Values stand at its top, as assignments; below
them nothing depends on the description. `on MACHINE FUNCTION ARGUMENTS` sends the script's functions to a machine and
calls one there; how, Slurm and ssh say themselves.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence

from arl.cluster.description import Description, OnHosts

BEGINS = "# ---- What happens here. ----"
_GIVE_UP_S = 1800
"""How long a script waits for the end of a process that still trains in run_dir."""


def host_script(description: OnHosts, *, top: str, start: str, machines: str) -> str:
    """The script.

    top: its first lines. start: what tells this start from others, in bash. machines: bash that sets MACHINES and
    PLACE, the directory on each machine for files of its processes, and defines on, notify, let_go and may_start.
    """
    parts = [top, _values(description, start), machines, _EVERYWHERE, _SERVERS[description.servers.kind]]
    parts += [_MIRROR] * description.has_mirrors
    parts += [_RAY] * (description.trainer.nodes > 1)
    parts += [_TRAIN, _START, _START_SERVERS]
    parts += [_START_RAY] * (description.trainer.nodes > 1)
    parts += [_WITH_MIRRORS] * description.has_mirrors
    return "\n".join([*parts, _FINISH])


def assigned(values: Mapping[str, str | int | Sequence[str]]) -> str:
    """Assignments in bash; a sequence becomes an array."""
    return "".join(f"{name}={_value(value)}\n" for name, value in values.items())


def flags_in_bash(description: Description) -> str:
    """The flags that tell the training script what the description says, as a bash array. It names the script's own
    variables, so that each value stands in one place."""
    flags = ['--model "$MODEL" --run_dir "$RUN_DIR" --checkpoint.notice_s "$NOTICE_S" --engine.kind sglang']
    flags.append(f"--weights.transport {description.transport}")
    if description.transport in ("disk", "adapter"):
        flags[-1] += ' --weights.directory "$RUN_DIR/weights"'
    if description.trainer.num_ranks > 1:
        flags.append(f"--train.num_ranks {description.trainer.num_ranks}")
    if description.trainer.gpus_per_node:
        flags.append("--train.device cuda")
    return "FLAGS=(\n" + "".join(f"  {line}\n" for line in flags) + ")\n"


def quoted_path(path: str) -> str:
    """The path for bash, which replaces a ~ at its start by the home directory."""
    return "~/" + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


def _value(value: str | int | Sequence[str]) -> str:
    return shlex.quote(str(value)) if isinstance(value, str | int) else f"({shlex.join(value)})"


def _values(description: OnHosts, start: str) -> str:
    trainer, servers = description.trainer, description.servers
    exports = "".join(f"  export {name}={shlex.quote(text)}\n" for name, text in description.environment.items())
    secrets = "".join(
        f"  export {name}; {name}=$(<{quoted_path(file)})\n" for name, file in description.key_files.items()
    )
    with_ray = trainer.nodes > 1
    of_ray = {"TRAINER_GPUS": trainer.gpus_per_node, "TRAINER_CPUS": trainer.cpus_per_node or ""} if with_ray else {}
    values = {
        "NAME": description.name,
        "WORKDIR": description.workdir,
        "RUN_DIR": description.run_dir,
        "MODEL": description.model,
        "PYTHON": description.python,
        "INTERFACE": description.interface or "",
        "TRAINERS": trainer.nodes,
        **of_ray,
        "SERVER_KIND": servers.kind,
        "SERVERS_PER_MACHINE": servers.per_node,
        "GPUS_PER_SERVER": servers.gpus_per_server,
        "SERVER_PYTHON": servers.python or description.python,
        "SERVER_ARGUMENTS": servers.arguments,
        "RESTARTS": servers.restarts,
        "STARTUP_S": servers.startup_s,
        "NOTICE_S": description.notice_s,
        "COMMAND": description.words,
    }
    sent = "\n  ".join(textwrap.wrap(" ".join([*values, "KEYS", "LOGS", "PLACE"]), 110))
    ray = ' RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$KEYS/ray" RAY_USAGE_STATS_ENABLED=0' * with_ray
    return f"""\
# What runs.
{assigned(values)}{flags_in_bash(description)}LOGS=$RUN_DIR/logs/launch
KEYS=$RUN_DIR-keys-{start}  # for this start alone, and for your eyes alone
SENT="{sent}"

environment() {{  # of every process, on every machine
  export PATH="${{PYTHON%/*}}:$PATH"{ray}
  if [ -n "$INTERFACE" ]; then export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE; fi
{exports}  [ -x "$PYTHON" ] || die "$HOSTNAME has no $PYTHON"
  cd "$WORKDIR"
}}

key_variables() {{  # of the training script alone
  export ARL_SERVER_API_KEY ARL_MIRROR_API_KEY
  ARL_SERVER_API_KEY=$(<"$KEYS/server")
  ARL_MIRROR_API_KEY=$(<"$KEYS/mirror")
{secrets}}}
"""


_EVERYWHERE = f"""\
say() {{ echo "$(date '+%F %T') $NAME: $*" >&2; }}
die() {{ say "$*"; exit 1; }}

# ---- What happens on a machine: `on MACHINE FUNCTION ARGUMENTS` calls one of these functions there. ----

there() {{  # prints the bash that calls a function on another machine
  # shellcheck disable=SC2086
  declare -p $SENT
  declare -f
  echo "set -euo pipefail"
  echo "environment"
  printf '%q ' "$@"
}}

make_place() {{  # for files of processes of this machine
  (umask 077 && mkdir -p "$PLACE")
  [ -O "$PLACE" ] || die "$PLACE on $HOSTNAME belongs to somebody else"
}}

check() {{  # prints this machine's address and versions
  may_start
  "$PYTHON" -m arl.cluster.on_node check ${{INTERFACE:+--interface "$INTERFACE"}} "$@"
}}

is_training() {{  # whether a process holds run_dir
  local code=0
  flock --shared --nonblock --conflict-exit-code 75 "$RUN_DIR/run.lock" true || code=$?
  ((code == 75))
}}

predecessor() {{  # waits while another process trains in run_dir, such as that of a requeued job which is still ending
  local waited
  mkdir -p "$LOGS"
  for ((waited = 0; waited < {_GIVE_UP_S}; waited += 2)); do
    is_training || return 0
    ((waited % 60)) || say "waits for the end of the run that holds $RUN_DIR/run.lock: $(<"$RUN_DIR/run.lock")"
    sleep 2
  done
  die "that run has not ended: end it, or choose another run_dir"
}}

new_keys() {{  # what servers, mirrors and Ray ask for; never on a command line
  local what
  umask 077
  mkdir -p "$KEYS"
  for what in server mirror ray; do
    "$PYTHON" -c 'import secrets; print(secrets.token_hex(32))' >"$KEYS/$what"
  done
  echo "api-key: $(<"$KEYS/server")" >"$KEYS/sglang.yaml"
}}

can_train() {{  # ends the start early where the training script could not begin
  key_variables
  type -P "${{COMMAND[0]}}" >/dev/null || die "$HOSTNAME has no program ${{COMMAND[0]}}, with which command begins"
}}

keep() {{  # keep NAME COMMAND...: starts a command again when it ends
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
}}

servers() {{  # prints the ports of this machine's servers, and of the mirror; then runs them
  local i ports gpus running=()
  exec 2>>"$LOGS/servers-$HOSTNAME.log"
  exec {{ports_of}}< <(exec "$PYTHON" -m arl.cluster.on_node ports $((SERVERS_PER_MACHINE + 1)))
  read -r -a ports -u "$ports_of"
  echo "${{ports[*]}}"
  IFS=, read -r -a gpus <<<"${{CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((SERVERS_PER_MACHINE * GPUS_PER_SERVER)))}}"
  for ((i = 0; i < SERVERS_PER_MACHINE; i++)); do
    if ((GPUS_PER_SERVER > 0)); then
      export CUDA_VISIBLE_DEVICES
      CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${{gpus[*]:i * GPUS_PER_SERVER:GPUS_PER_SERVER}}")
    fi
    keep "server $i" server "${{ports[i]}}" &
    running+=($!)
  done
  if [ "$(type -t mirror)" = function ]; then keep "the mirror" mirror "${{ports[i]}}" & fi
  wait "${{running[@]}}"
}}
"""

_SGLANG = """\
server() {  # one server, at this port of all interfaces; SGLang takes its key from a file
  "$SERVER_PYTHON" -m sglang.launch_server --config "$KEYS/sglang.yaml" --model-path "$MODEL" \\
    --host 0.0.0.0 --port "$1" --tp-size $((GPUS_PER_SERVER > 0 ? GPUS_PER_SERVER : 1)) "${SERVER_ARGUMENTS[@]}"
}
"""
_EMBEDDED = """\
server() {  # one server, at this port of all interfaces
  "$PYTHON" -m arl.engine.local --model "$MODEL" --host 0.0.0.0 --port "$1" --api-key-file "$KEYS/server" \\
    "${SERVER_ARGUMENTS[@]}"
}
"""
_SERVERS = {"sglang": _SGLANG, "embedded": _EMBEDDED}

_MIRROR = """\
mirror() {  # one mirror, at this port of all interfaces: the servers of this machine load their weights from its copy
  "$PYTHON" -m arl.engine.weights.mirror --host 0.0.0.0 --port "$1" --api-key-file "$KEYS/mirror"
}
"""

_RAY = """\
ray_node() {  # ray_node ADDRESS [HEAD]: runs Ray; without HEAD, prints what the other machines call HEAD
  local ray left where=(--head --port=0 --include-dashboard=false)
  exec 2>>"$LOGS/ray-$HOSTNAME.log"
  if [ $# = 2 ]; then where=(--address="$2"); fi
  make_place
  rm -rf "$PLACE/ray"
  # Slurm sends its SIGTERM to every process of a job, and ends Ray thereby: the ranks could not write the checkpoint.
  setsid "$PYTHON" -m arl.cluster.on_node blocking-sigterm "$PYTHON" -m ray.scripts.scripts start "${where[@]}" \\
    --node-ip-address="$1" --temp-dir="$PLACE/ray" --num-gpus="$TRAINER_GPUS" \\
    ${TRAINER_CPUS:+--num-cpus="$TRAINER_CPUS"} --block >&2 &
  ray=$!
  # shellcheck disable=SC2064
  trap "end_ray $ray" EXIT
  trap 'say "Ray stays until the checkpoint is written"' TERM
  if [ $# = 1 ]; then
    until [ -s "$PLACE/ray/ray_current_cluster" ]; do kill -0 "$ray"; sleep 0.5; done
    cat "$PLACE/ray/ray_current_cluster"; echo
  fi
  wait "$ray" || { for ((left = NOTICE_S; left > 0; left--)); do is_training || break; sleep 1; done; }
}

end_ray() {
  trap '' TERM
  pkill -KILL --session "$1" || true
  rm -rf "$PLACE/ray"
  rmdir "$PLACE" || true
}
"""

_TRAIN = f"""\
train() {{  # train FLAGS...: the training script
  key_variables
  rm -f "$RUN_DIR/servers.txt"  # which names servers of an earlier start
  echo "$BASHPID" >"$KEYS/train.pid"
  exec "${{COMMAND[@]}}" "$@"
}}

{BEGINS}
"""

_START = """\
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
"""

_START_SERVERS = """\
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
    MIRRORS+=", \\"http://${ADDRESSES[i]}:$port\\": \\"http://${ADDRESSES[i]}:${ports[SERVERS_PER_MACHINE]}\\""
  done
done
say "starts ${#URLS[@]} servers; their logs are in $LOGS"

for url in "${URLS[@]}"; do FLAGS+=(--engine.addresses "$url"); done
"""

_START_RAY = """\
on "${MACHINES[0]}" ray_node "${ADDRESSES[0]}" >"$HERE/ray" &
STEPS[0]=$!
RAY=$(first_line "$HERE/ray" "${STEPS[0]}" "Ray on ${MACHINES[0]}")
for ((i = 1; i < TRAINERS; i++)); do
  on "${MACHINES[i]}" ray_node "${ADDRESSES[i]}" "$RAY" &
  STEPS[i]=$!
done
FLAGS+=(--train.ray_address "$RAY")
"""

_WITH_MIRRORS = """\
FLAGS+=(--weights.mirrors "{${MIRRORS#, }}")
"""

_FINISH = """\
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
"""
