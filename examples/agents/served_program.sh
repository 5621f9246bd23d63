#!/bin/bash
# A program that plays episodes of `arl serve` with curl: the same as served_program.py.
#
#     export ARL_ENDPOINT_KEY=...
#     ./served_program.sh http://HOST:8000
set -euo pipefail

url=$1
keys=$(mktemp -d)  # every user of this machine can read command lines
trap 'rm -rf "$keys"' EXIT
use() { printf 'header = "Authorization: Bearer %s"\n' "$2" >"$keys/$1"; }
use operator "$ARL_ENDPOINT_KEY"

field() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p"; }  # of JSON in one line, as arl writes it

ask() { curl --silent --show-error --config "$keys/$1" "${@:2}"; }

again=(--retry 300 --retry-connrefused --retry-delay 1)  # arl may begin to listen later
while true; do
  # curl asks again after a 503: no episode is free now. It fails after a 410, and once arl is gone: the run is over.
  episode=$(ask operator "${again[@]}" --fail --json '{}' "$url/episodes") || exit 0
  again=(--retry 60)
  id=$(field id <<<"$episode")
  use episode "$(field api_key <<<"$episode")"
  question=$(field question <<<"$episode")
  said=$(ask episode --json "{\"messages\": [{\"role\": \"user\", \"content\": \"$question\"}]}" \
    "$(field base_url <<<"$episode")/chat/completions" | field content) || exit 0
  if [ "$said" = "$(field answer <<<"$episode")" ]; then reward=1; else reward=0; fi
  ask operator --json "{\"reward\": $reward}" "$url/episodes/$id/end" || exit 0
  echo
done
