#!/usr/bin/env bash
# Ends the cluster that up.sh started in FOLDER (default: ${TMPDIR:-/tmp}/rl-slurm) and all its jobs. The logs stay.
#
#     tests/cluster/down.sh [FOLDER]
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"

folder=$(realpath -m -- "${1:-${TMPDIR:-/tmp}/rl-slurm}")
conf=$folder/slurm.conf

gone() { ! kill -0 "$1" 2> /dev/null; }

stop() {  # stop NAME: the daemon of that name whose pid file lies in the folder
    local file=$folder/$1.pid name=$1 pid
    [[ "$name" != munge ]] || name=munged
    [[ -s "$file" ]] || return 0
    pid=$(< "$file")
    # After a crash, the number may be another process's by now.
    if [[ "$(cat "/proc/$pid/comm" 2> /dev/null)" == "$name" ]]; then
        kill "$pid"
        for _ in {1..50}; do gone "$pid" && break; sleep 0.1; done
        gone "$pid" || kill -KILL "$pid"
    fi
    rm -f "$file"
}

jobs_processes() {  # what ran in a job of this cluster, also what left its job's process tree, and what ran the job
    local process
    for process in /proc/[0-9]*; do
        if { cat "$process/comm"; tr '\0' '\n' < "$process/environ"; } 2> /dev/null | awk -v conf="SLURM_CONF=$conf" \
            '$0 == conf {ours = 1} $0 == "slurmstepd" || /^SLURM_JOB_ID=/ {job = 1} END {exit !(ours && job)}'; then
            echo "${process#/proc/}"
        fi
    done
}

if [[ ! -e "$conf" ]]; then
    echo "down.sh: no cluster in $folder"
    exit 0
fi
stop slurmctld  # first, so that nothing is requeued
stop slurmd
# Twice: a process may start another one meanwhile.
for _ in 1 2; do
    for pid in $(jobs_processes); do
        [[ "$pid" == "$$" ]] || kill -KILL "$pid" 2> /dev/null || true
    done
done
stop munge
rm -f "$conf"
echo "down.sh: down in $folder"
