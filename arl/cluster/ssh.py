"""A run on a list of hosts: one script, which starts everything by ssh and stops it."""

from __future__ import annotations

from arl.cluster.description import SshDescription
from arl.cluster.host_script import BEGINS, assigned, host_script


def ssh_script(description: SshDescription) -> str:
    """The script for `bash`: `bash SCRIPT` runs everything until the run ends, `bash SCRIPT stop` ends it from
    elsewhere."""
    hosts = assigned({"MACHINES": description.hosts, "SSH_OPTIONS": description.ssh_options})
    top = _TOP.format(name=description.name)
    script = host_script(description, top=top, start="$(date +%s)", machines=hosts + _MACHINES)
    return script.replace(BEGINS, _STOP + BEGINS)


_TOP = """\
#!/bin/bash
# A run of arl, made by `arl launch`.
#
#   bash {name}.sh         starts everything, and ends everything when the run ends; Ctrl-C writes a checkpoint first
#   bash {name}.sh stop    does what Ctrl-C does, from elsewhere, and ends what an earlier start may have left
#
# The first hosts train, the first of them also runs the script; the other hosts run servers. Each process on a host
# ends with its connection to this script. To log out meanwhile, start it in tmux or screen.
# shellcheck disable=SC2329  # functions are called by their names, on other machines
set -euo pipefail
"""

_MACHINES = """\
PLACE=/tmp/arl-$NAME
ALIVE=$(mktemp --dry-run)
mkfifo "$ALIVE"
exec {LIFE}<>"$ALIVE"  # this script alone keeps it open

on() {  # until the function ends there, or this script does: its standard input is what the host watches
  local machine=$1 text quote="'" quoted="'\\\\''"
  shift
  if ((BASH_SUBSHELL > 0)); then exec {LIFE}>&-; fi
  text=$(there guarded "$@")
  # In a session of its own, so that Ctrl-C does not end it.
  setsid ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 "${SSH_OPTIONS[@]}" "$machine" \\
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
"""

_STOP = """\
end_training() {  # on the first host: as Ctrl-C
  local left host pid
  is_training || return 0
  host=$(sed -n 's/.*"host": "\\([^"]*\\)".*/\\1/p' "$RUN_DIR/run.lock")
  pid=$(sed -n 's/.*"pid": \\([0-9]*\\).*/\\1/p' "$RUN_DIR/run.lock")
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
"""
