#!/usr/bin/env bash
# A Slurm cluster of this one machine, for the tests: munged, slurmctld and slurmd as root, no systemd.
#
#     eval "$(tests/cluster/up.sh [FOLDER])"      # sets SLURM_CONF; FOLDER is ${TMPDIR:-/tmp}/rl-slurm by default
#     sinfo; sbatch …
#     tests/cluster/down.sh [FOLDER]
#
# Everything the cluster writes lies in FOLDER. Its node claims 4 CPUs whatever the machine has, so that jobs can run
# side by side; partition `high` pre-empts and requeues the jobs of `low`, the default. Stdout is for eval, stderr for
# people. Exit codes: 0 it is up, 1 it did not come up, 3 Slurm or munge is not installed.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"

folder=$(realpath -m -- "${1:-${TMPDIR:-/tmp}/rl-slurm}")
conf=$folder/slurm.conf

fail() { echo "up.sh: $2" >&2; exit "$1"; }

answers() { SLURM_CONF=$conf timeout 20 scontrol ping 2> /dev/null | grep -q 'is UP'; }

node_is() { [[ "$(SLURM_CONF=$conf timeout 20 sinfo --noheader --partition=low --format=%T 2> /dev/null)" == "$1" ]]; }

wait_for() {  # wait_for SECONDS COMMAND…
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < end)) || return 1
        sleep 0.2
    done
}

free_port() {  # free_port FROM: the first port from there on that nothing listens on
    local port=$1
    while (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do port=$((port + 1)); done
    echo "$port"
}

write_conf() {
    local host controller daemon memory
    host=$(hostname -s)
    controller=$(free_port 6817)
    daemon=$(free_port $((controller + 1)))
    memory=$(awk '/^MemTotal:/ {print int($2 / 1024)}' /proc/meminfo)
    cat > "$conf" << END
ClusterName=rl
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller
SlurmdPort=$daemon
SlurmUser=root
SlurmdUser=root

# A requeued job is held for as long as its old credential lives: 120 s by default.
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5

StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log

ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
MessageTimeout=30

SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1

# Between SIGTERM and SIGKILL, seconds.
KillWait=20
# How long an ended job is still shown, seconds.
MinJobAge=600

SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=$memory
PartitionName=low Nodes=$host Default=YES PriorityTier=1 DefaultTime=10 MaxTime=INFINITE
PartitionName=high Nodes=$host PriorityTier=10 DefaultTime=10 MaxTime=INFINITE
END
}

start() {
    # Daemons that would hold our stdout open would block a caller that reads it; and their jobs are not part of a job
    # that this may run in.
    env -u SLURM_JOB_ID -u SLURM_CONF "$@" < /dev/null >> "$folder/start.log" 2>&1 9>&-
}

give_up() {  # like fail 1, for when daemons may run already
    "$(dirname -- "${BASH_SOURCE[0]}")/down.sh" "$folder" >&2
    fail 1 "$1"
}

((EUID == 0)) || fail 1 "run it as root: slurmd starts jobs as their owners"
for program in munged slurmctld slurmd scontrol sinfo; do
    command -v "$program" > /dev/null || fail 3 "$program is missing: apt-get install slurm-wlm munge"
done
# A socket's path holds 107 bytes, and slurmd puts one for each step into spool/.
((${#folder} <= 60)) || fail 1 "$folder is too long for the sockets in it: name a folder of at most 60 characters"
mkdir -p "$folder"
[[ -O "$folder" ]] || fail 1 "$folder belongs to someone else: name another folder"
exec 9> "$folder/lock"
flock 9

if [[ -e "$conf" ]] && answers; then
    echo "up.sh: already up in $folder" >&2
else
    [[ ! -e "$conf" ]] || "$(dirname -- "${BASH_SOURCE[0]}")/down.sh" "$folder" >&2  # what a killed one left
    chmod 755 "$folder"
    rm -rf "$folder"/{state,spool,munge.*,start.log,slurmctld.*,slurmd.*}
    mkdir "$folder"/{state,spool}
    (umask 077 && head -c 1024 /dev/urandom > "$folder/munge.key")
    write_conf
    # Debian's own munged, its key and its socket are left alone: ours runs as root on a key that root owns.
    start munged --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munge.pid" \
        --log-file="$folder/munge.log" --seed-file="$folder/munge.seed" ||
        give_up "munged did not start: see $folder/start.log and munge.log"
    start slurmctld -f "$conf" -c || give_up "slurmctld did not start: see $folder/start.log and slurmctld.log"
    wait_for 60 answers || give_up "slurmctld does not answer: see $folder/slurmctld.log"
    start slurmd -f "$conf" || give_up "slurmd did not start: see $folder/start.log and slurmd.log"
    wait_for 60 node_is idle || give_up "the node does not become idle: see $folder/slurmd.log and slurmctld.log"
    echo "up.sh: up in $folder" >&2
fi
printf 'export SLURM_CONF=%q\n' "$conf"
