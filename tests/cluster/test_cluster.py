"""What the launchers build on, on a real Slurm: arrays, pre-emption, the time limit's warning, scancel."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cluster.conftest import HERE, Cluster, wait_until

pytestmark = pytest.mark.slurm


def written(log: Path) -> list[str]:
    """The lines that jobs wrote so far."""
    return log.read_text().splitlines() if log.exists() else []


def test_every_element_of_an_array_runs(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(
        "#!/bin/sh\necho $SLURM_ARRAY_JOB_ID $SLURM_CPUS_PER_TASK; exit $SLURM_ARRAY_TASK_ID\n",
        "--array=0-2",
        "--cpus-per-task=2",
        f"--output={tmp_path}/%a.txt",
    )
    ends = {f"{job}_0": "COMPLETED", f"{job}_1": "FAILED", f"{job}_2": "FAILED"}
    for element, state in ends.items():
        assert cluster.wait(element, ("COMPLETED", "FAILED")) == state
    assert [cluster.scontrol(element)["ExitCode"] for element in ends] == ["0:0", "1:0", "2:0"]
    assert [written(tmp_path / f"{i}.txt") for i in range(3)] == [[f"{job} 2"]] * 3


def test_a_higher_partition_preempts_and_the_job_comes_back(
    cluster: Cluster, alone: None, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    low = cluster.submit(
        f"""#!/bin/bash
        [[ "$SLURM_RESTART_COUNT" != 1 ]] || {{ echo "again in $SLURM_JOB_ID" >> {log}; exit; }}
        trap 'echo TERM >> {log}; exit 143' TERM
        echo start >> {log}
        while :; do sleep 0.1; done
        """,
        "--ntasks=4",
    )
    wait_until(lambda: written(log) == ["start"], "the job in `low` starts")
    high = cluster.submit(f"#!/bin/sh\necho high >> {log}\n", "--ntasks=4", "--partition=high")
    cluster.wait(high, "COMPLETED")
    cluster.wait(low, "COMPLETED")
    assert written(log) == ["start", "TERM", "high", f"again in {low}"]
    assert cluster.scontrol(low)["Restarts"] == "1"


def test_a_warned_job_requeues_itself_before_its_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    # Slurm looks at time limits every 30 seconds and rather warns too early: with one minute and a warning 50
    # seconds before its end, that is at the first look.
    job = cluster.submit(
        f"""#!/bin/bash
        [[ "$SLURM_RESTART_COUNT" != 1 ]] || {{ echo again >> {log}; exit; }}
        trap 'echo USR2 >> {log}; scontrol requeue $SLURM_JOB_ID' USR2
        trap 'echo TERM >> {log}; exit 140' TERM
        echo start >> {log}
        while :; do sleep 0.1; done
        """,
        "--time=1",
        "--signal=B:USR2@50",
    )
    cluster.wait(job, "COMPLETED")
    assert written(log) == ["start", "USR2", "TERM", "again"]
    assert cluster.scontrol(job)["Restarts"] == "1"


def test_an_element_is_requeued_alone_under_its_array_name(cluster: Cluster, tmp_path: Path) -> None:
    # One element has the number of the array as its SLURM_JOB_ID: requeued by that, all elements restart.
    job = cluster.submit(
        f"""#!/bin/bash
        log={tmp_path}/$SLURM_ARRAY_TASK_ID
        echo "${{SLURM_RESTART_COUNT:-0}}" >> $log
        [[ "$SLURM_RESTART_COUNT" != 1 ]] || exit 0
        if [[ $SLURM_JOB_ID == $SLURM_ARRAY_JOB_ID ]]; then
            while [[ ! -e {tmp_path}/0 || ! -e {tmp_path}/1 ]]; do sleep 0.1; done
            scontrol requeue ${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
        fi
        sleep 3
        """,
        "--array=0-1",
    )
    for element in (f"{job}_0", f"{job}_1"):
        cluster.wait(element, "COMPLETED")
    assert sorted(cluster.scontrol(f"{job}_{i}")["Restarts"] for i in (0, 1)) == ["0", "1"]
    assert sorted(written(tmp_path / str(i)) for i in (0, 1)) == [["0"], ["0", "1"]]


def test_without_a_b_the_warning_reaches_the_steps_and_not_the_script(
    cluster: Cluster, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    step = tmp_path / "step.sh"
    step.write_text(f"trap 'echo step >> {log}; exit' USR2\nwhile :; do sleep 0.1; done\n")
    job = cluster.submit(
        f"#!/bin/bash\ntrap 'echo script >> {log}' USR2\nsrun bash {step} &\nwait; wait\n",
        "--time=1",
        "--signal=USR2@50",
    )
    cluster.wait(job, "COMPLETED")
    assert written(log) == ["step"]


def test_scancel_gives_a_job_the_time_to_end(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = cluster.submit(
        f"#!/bin/bash\ntrap 'echo TERM >> {log}; sleep 1; echo saved >> {log}; exit' TERM\n"
        f"echo start >> {log}\nwhile :; do sleep 0.1; done\n"
    )
    wait_until(lambda: written(log) == ["start"], "the job starts")
    cluster.cancel(job)
    assert cluster.wait(job, "CANCELLED") == "CANCELLED"
    wait_until(lambda: written(log) == ["start", "TERM", "saved"], "the job saves")
    assert cluster.scontrol(job)["JobState"] == "CANCELLED"


def test_up_leaves_a_cluster_that_runs(cluster: Cluster) -> None:
    folder = Path(cluster.env["SLURM_CONF"]).parent
    if not (folder / "munge.key").exists():
        pytest.skip("SLURM_CONF names a cluster that tests/cluster/up.sh did not start")
    pid = (folder / "slurmctld.pid").read_text()
    again = subprocess.run((HERE / "up.sh", folder), capture_output=True, text=True, check=True)
    assert again.stdout == f"export SLURM_CONF={folder}/slurm.conf\n"
    assert "already up" in again.stderr
    assert (folder / "slurmctld.pid").read_text() == pid
