#!/bin/bash
# A Ray cluster by hand, closed to who has not the token; hyimg and the sources on every machine.
#
#   export RAY_AUTH_TOKEN=$(openssl rand -hex 32)    the same one on all machines
#   bash ray.sh head                                 on the first machine; stays until Ctrl-C
#   bash ray.sh join FIRST:6379                      on each other one; the same
#   bash ray.sh run --replicas 16                    on the first, with options of generate
#
# A machine leaves with its command: `ray stop` would end every cluster of that machine.
# MANIFEST, OUT, PORT, CPUS (of this machine; by default all) may be set.
set -euo pipefail
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
: "${RAY_AUTH_TOKEN:?openssl rand -hex 32 makes one; it is the same on all machines}"
port=${PORT:-6379}
case "${1:?head, join or run}" in
  head)
    exec ray start --head --port="$port" --include-dashboard=false --block ${CPUS:+--num-cpus="$CPUS"}
    ;;
  join) exec ray start --address="${2:?FIRST:6379}" --block ${CPUS:+--num-cpus="$CPUS"} ;;
  run)
    shift
    exec hyimg generate "${MANIFEST:-jobs.jsonl}" -o "${OUT:-runs/night}" \
      --ray-address "127.0.0.1:$port" --progress plain "$@"
    ;;
  *)
    echo "head, join or run" >&2
    exit 2
    ;;
esac
