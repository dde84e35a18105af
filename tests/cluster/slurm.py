"""Debian's Slurm on the hosts of `tests.cluster.hosts`: munged and slurmd on each, slurmctld here.

All of them listen on the addresses of the bridge alone. The commands salloc, srun, squeue, ... find
this Slurm by the environment variable SLURM_CONF.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.hosts import HERE, Host, Network
from tests.support.readme import ROOT
from tests.support.waiting import until

CPUS = 2
"""Processors that Slurm counts on each host."""

_NEEDED = {
    **dict.fromkeys(("slurmctld", "slurmd", "srun", "sinfo"), "slurm-wlm"),
    **dict.fromkeys(("munged", "munge"), "munge"),
}
_CONF = """
ClusterName=ortlab
SlurmctldHost=control({here})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny
DebugFlags=NO_CONF_HASH
StateSaveLocation={state}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog=/mnt/task_prolog
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=5
OverTimeLimit=0
SlurmdTimeout=15
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
UnkillableStepTimeout=20
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
PartitionName=short Nodes=ALL MaxTime=1 State=UP
PartitionName=one Nodes=alpha MaxNodes=1 State=UP
PartitionName=closed Nodes=ALL State=DOWN
"""
_PROLOG = """#!/bin/sh
echo export PYTHONPATH={root}
echo export TMPDIR=/mnt/tmp
echo export ORTLAB_HOME=/mnt/home
echo export XDG_CACHE_HOME=/mnt/cache
"""


def missing() -> str | None:
    """Return why there can be no Slurm on this machine; None if there can."""
    for program, package in _NEEDED.items():
        if shutil.which(program) is None:
            return f"tests with Slurm need {package}, which is not installed"
    return None


class Slurm:
    """Slurm on the hosts of a network.

    Args:
        network: The hosts.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.folder = network.folder / "slurm"
        self.folder.mkdir(mode=0o755)
        self._key = secrets.token_bytes(64)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._munge("munged", self.folder)
            self._begin("slurmctld", self.folder, self._written(self.folder))
            until(self._answers)
            hosts = list(network.hosts.values())
            for host in hosts:
                self._written(host.folder, seen_at="/mnt")
                with (host.folder / "hosts").open("a") as names:  # as in a cluster's
                    names.writelines(f"{each.address} {each.name}\n" for each in hosts)
                prolog = host.folder / "task_prolog"
                prolog.write_text(_PROLOG.format(root=ROOT))
                prolog.chmod(0o755)
                self._munge(f"munged-{host.name}", host.folder, host)
                self.start(host.name)
            until(lambda: self.told("sinfo", "-h", "-p", "main", "-o", "%t %D") == "idle 2")
        except BaseException:
            self.close()
            raise

    @property
    def conf(self) -> Path:
        """Configuration for the commands of this process."""
        return self.folder / "slurm.conf"

    @property
    def _env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def told(self, *words: str) -> str:
        """Run one of Slurm's commands and return its output."""
        done = subprocess.run(words, env=self._env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def jobs(self) -> list[tuple[str, str]]:
        """Return the jobs that have not ended, with their states."""
        lines = self.told("squeue", "--noheader", "--format=%i %T").splitlines()
        return [(job, state) for job, _, state in (line.partition(" ") for line in lines)]

    def _answers(self) -> bool:
        words = ("scontrol", "ping")
        done = subprocess.run(words, env=self._env, capture_output=True, text=True, check=False)
        return "is UP" in done.stdout

    def start(self, name: str) -> None:
        """Start the daemon of a host."""
        host = self._network.hosts[name]
        words = ("slurmd", "-D", "-N", name, "-f", "/mnt/slurm.conf")
        self._running[f"slurmd-{name}"] = self._inside(host, words, "slurmd.log")
        until(lambda: "slurmd started" in (host.folder / "slurmd.log").read_text())
        self._note_servers(host)

    def kill(self, name: str) -> None:
        """Kill the daemon of a host; its tasks go on."""
        host = self._network.hosts[name]
        for pid, words in host.all_processes().items():
            if words[0] == "slurmd":
                os.kill(pid, signal.SIGKILL)
        self._running.pop(f"slurmd-{name}").wait()

    def _note_servers(self, host: Host) -> None:
        names = ("nsenter", "munged", "slurmd")
        host.servers |= {pid for pid, words in host.all_processes().items() if words[0] in names}

    def close(self) -> None:
        """End all jobs and daemons."""
        for each in reversed(self._running.values()):
            each.kill()
            each.wait()

    def _munge(self, name: str, folder: Path, host: Host | None = None) -> None:
        seen = Path("/mnt") if host else folder
        key = folder / "munge.key"
        key.write_bytes(self._key)
        key.chmod(0o400)
        words = (
            *("munged", "--foreground", "--force", f"--key-file={seen}/munge.key"),
            *(f"--socket={seen}/munge.socket", f"--pid-file={seen}/munge.pid"),
            *(f"--log-file={seen}/munge.log", f"--seed-file={seen}/munge.seed"),
        )
        if host is None:
            self._begin(name, folder, words)
        else:
            self._running[name] = self._inside(host, words, "munged.log")
        until((folder / "munge.socket").exists)

    def _begin(self, name: str, folder: Path, words: Sequence[str]) -> None:
        with (folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _inside(self, host: Host, words: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        with (host.folder / log).open("ab") as out:
            return subprocess.Popen(
                [
                    *("nsenter", "--target", str(host.pid), "--net", "--uts", "--mount", "--pid"),
                    *("env", "-i", f"PATH={os.environ['PATH']}", *words),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd="/",
            )

    def _written(self, folder: Path, *, seen_at: str = "") -> tuple[str, ...]:
        """Write a configuration; return the command of slurmctld that reads it."""
        hosts = self._network.hosts.values()
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs={CPUS} RealMemory=1000"
            for host in hosts
        )
        state = self.folder / "state"
        state.mkdir(exist_ok=True)
        path = folder / "slurm.conf"
        path.write_text(
            _CONF.format(
                here=HERE,
                folder=seen_at or folder,
                state=state,
                nodes=nodes,
            )
        )
        names = folder / "hosts"
        if not names.exists():
            names.write_text(f"127.0.0.1 localhost\n{HERE} control\n")
        listening = 'mount --bind "$1" /etc/hosts; hostname control; exec slurmctld -D -c -f "$2"'
        # It listens on the address of its own name.
        return ("unshare", "--uts", "--mount", "sh", "-c", listening, "sh", str(names), str(path))
