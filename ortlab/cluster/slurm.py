"""Workers as a job of Slurm: salloc asks for the hosts, srun reaches each of them.

The job ends with this process, killed or not: salloc is the child of `ortlab.cluster.process`, and
its own command ends with the pipe to it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ortlab.cluster import checks, facts
from ortlab.cluster.checks import Reached
from ortlab.cluster.link import Link, Way, end_all, first_python
from ortlab.engines.base import tell
from ortlab.settings import unknown_name
from ortlab.utils.threads import Thread
from ortlab.utils.wording import counted

_COMMANDS: Final = ("salloc", "srun", "sinfo", "squeue", "scontrol")
_ANSWER_S: Final = 5.0
"""Seconds that Slurm's controller has to answer a question."""
_POLL_S: Final = 0.1
_ASK_S: Final = 2.0
"""Seconds between questions about a job that waits."""
_TELL_S: Final = 30.0
"""Seconds after which a line repeats that a job waits for the same reason."""
_TO_END_S: Final = 5.0
_COMPLETING_S: Final = 3.0
"""Seconds until a job that is being ended shows how."""
_GRANTED: Final = (
    f'echo "{facts.GREETING}$SLURM_JOB_ID $SLURM_JOB_NODELIST $SLURM_TASKS_PER_NODE"; '
    "cat >/dev/null"
)
"""Command of salloc: names the hosts, then keeps the job until its standard input ends."""
_DOWN: Final = "%N is %T (%E)"
"""Format of sinfo for hosts that run no jobs."""
_PORT: Final = 6818
"""A port of a host, to find the route to it; nothing is sent there."""
_NEVER: Final = {
    "PartitionNodeLimit": "ask for fewer hosts, or for another --partition",
    "PartitionTimeLimit": "ask for less by --time, or for another --partition: sinfo -o '%P %l' "
    "lists their limits",
    "PartitionDown": "choose another by --partition; sinfo lists them",
    "PartitionInactive": "choose another by --partition; sinfo lists them",
    "AccountNotAllowed": "name another account by --account",
    "InvalidAccount": "name another account by --account",
    "InvalidQOS": "name another one, as in --slurm-options qos=NAME",
    "QOSNotAllowed": "name another one, as in --slurm-options qos=NAME",
    "BadConstraints": "relax the constraints; sinfo -o '%N %f' lists what hosts have",
}
"""Reasons for which a job waits until somebody changes it or the partition, and the next step."""
_OURS: Final = ("ntasks", "ntasks-per-node", "wait", "no-shell", "quiet")
"""Options of salloc that follow from other arguments."""


@dataclass(frozen=True)
class SlurmJob:
    """Hosts of a job of Slurm that does not exist yet.

    Attributes:
        count: Number of workers, which are its tasks.
        per_host: Number of workers on each host; None leaves that to Slurm.
        options: Options of salloc with their values, as words.
        partition: Name of the partition; None for Slurm's default.
        python: Path of the interpreter on the hosts; None for the path of this process's, or
            else python3.
        address: Address of this machine by which the hosts reach it; None to find it.
    """

    count: int
    per_host: int | None = None
    options: tuple[str, ...] = ()
    partition: str | None = None
    python: str | None = None
    address: str | None = None

    @classmethod
    def chosen(
        cls,
        options: Mapping[str, Any],
        count: int | None,
        per_host: int | None,
        *,
        python: str | None = None,
        address: str | None = None,
    ) -> SlurmJob:
        """Return the job that a user chose.

        Args:
            options: Options of sbatch, such as ``{"partition": "gpu", "time": "1:00:00"}``; True
                for an option without a value.
            count: Number of workers.
            per_host: Number of workers on each host; None leaves that to Slurm.
            python: See `SlurmJob`.
            address: See `SlurmJob`.

        Raises:
            ValueError: If a number, an option or the address is impossible.
        """
        if count is None or count < 1:
            raise ValueError(f"slurm needs a number of workers, as in --slurm 4, not {count}")
        if per_host is not None and (per_host < 1 or count % per_host):
            nearest = max(1, per_host) * max(1, round(count / max(1, per_host)))
            raise ValueError(
                f"{counted(count, 'worker')} cannot be {per_host} on each host; start {nearest}, "
                "or change per_host"
            )
        words = []
        for name, value in options.items():
            flag = name.replace("_", "-")
            if flag in _OURS:
                raise ValueError(
                    f"Slurm's option --{flag} follows from the number of workers and per_host; "
                    "leave it out"
                )
            if value is not None and value is not False:
                words.append(f"--{flag}" if value is True else f"--{flag}={value}")
        if address is not None:
            checks.check_address(address)
        partition = options.get("partition") or os.environ.get("SALLOC_PARTITION")
        return cls(count, per_host, tuple(words), partition, python, address)

    @property
    def where(self) -> str:
        """See `Elsewhere.where`."""
        return "of Slurm"

    @property
    def typed(self) -> str:
        """See `Elsewhere.typed`."""
        own = f" --per-host {self.per_host}" if self.per_host else ""
        bare = shlex.join(word.removeprefix("--") for word in self.options)
        given = f" --slurm-options {shlex.quote(bare)}" if self.options else ""
        return f"--slurm {self.count}{own}{given}"

    @property
    def called(self) -> str:
        """See `Elsewhere.called`."""
        own = f", per_host={self.per_host}" if self.per_host else ""
        pairs = (word.removeprefix("--").partition("=") for word in self.options)
        slurm = {name: value if mark else True for name, mark, value in pairs}
        return f"{self.count}{own}, slurm={slurm or True!r}"

    def reach(self) -> Reached:
        """See `Elsewhere.reach`; waits as long as the job does, and an interrupt cancels it."""
        self._check_partition()
        tasks = [f"--ntasks={self.count}"]
        if self.per_host:
            tasks.append(f"--ntasks-per-node={self.per_host}")
        job = _Job(["--job-name=ortlab", *tasks, *self.options], self)
        links: list[Link] = []
        try:
            places = job.places()
            pythons = (self.python,) if self.python else (sys.executable, "python3")
            problems, sources = _located(list(places))
            address = self.address or checks.common_address(sources, problems, list(places))
            ways = [
                Way(host, job.srun(host, pythons), workers, _environment())
                for host, workers in places.items()
            ]
            links = checks.greet(
                ways,
                address,
                pythons=pythons,
                explained=job.explained,
                problems=problems,
                until=checks.soon(),
            )
            return Reached(links, address, "srun's connection", job.ended, job.release)
        except BaseException:
            end_all(links, kill=True)
            job.release()
            raise

    def _check_partition(self) -> None:
        """Raise RuntimeError if Slurm does not answer, or the partition cannot have so many tasks.

        Slurm itself would let some of them wait forever.
        """
        for command in _COMMANDS:
            if shutil.which(command) is None:
                raise RuntimeError(
                    f"{command} is not installed on this machine; start the notebook on a host of "
                    "the Slurm cluster, or install Slurm's commands (Debian: slurm-client)"
                )
        rows = [line.split("|") for line in _asked("sinfo", "-h", "-N", "-o", "%P|%N|%c|%a")]
        partitions = sorted({name.rstrip("*") for name, *_ in rows})
        chosen = self.partition
        if chosen is None:
            chosen = next((name.rstrip("*") for name, *_ in rows if name.endswith("*")), None)
        if chosen is None or "," in chosen:  # Slurm chooses among several
            return
        if chosen not in partitions:
            raise RuntimeError(
                f"Slurm has no partition {chosen!r}: {unknown_name(chosen, partitions)}"
            )
        own = {host: int(cpus) for name, host, cpus, _ in rows if name.rstrip("*") == chosen}
        fit = sum(min(self.per_host or cpus, cpus) for cpus in own.values())
        if self.count > fit and "--overcommit" not in self.options:
            raise RuntimeError(
                f"partition {chosen} has no room for {counted(self.count, 'worker')}: it has "
                f"{counted(sum(own.values()), 'processor')} on {counted(len(own), 'host')}; start "
                f"at most {fit}, or choose another by --partition"
            )


class _Job:
    """Job of Slurm, from the request on.

    Args:
        options: Options of salloc.
        asked: The request, for messages.
    """

    def __init__(self, options: list[str], asked: SlurmJob) -> None:
        self._asked = asked
        self._id: str | None = None
        self._words: deque[str] = deque(maxlen=20)
        self._granted: list[str] = []
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ortlab.cluster.process", "allocation", str(os.getpid())),
                *("salloc", *options, "sh", "-c", _GRANTED),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(),
            start_new_session=True,  # an interrupt of the kernel is not for it
        )
        self._answered = threading.Event()
        self._readers = [
            Thread(self._hear_errors, name="ortlab-salloc-errors"),
            Thread(self._hear, name="ortlab-salloc"),
        ]
        for reader in self._readers:
            reader.start()

    def places(self) -> dict[str, int]:
        """Wait for the hosts of the job, and say why it waits.

        Returns:
            The number of workers, by host.

        Raises:
            RuntimeError: If Slurm refuses the job, or it would wait forever.
        """
        asked = told = time.monotonic()
        before = ""
        while not self._answered.wait(_POLL_S):
            now = time.monotonic()
            if self._id is None or now - asked < _ASK_S:
                continue
            asked = now
            reason = self._waits()
            if (name := reason.strip("()").partition(",")[0]) in _NEVER:
                raise RuntimeError(
                    f"Slurm's job {self._id} would wait forever ({name}), and was canceled; "
                    f"{_NEVER[name]}"
                )
            if reason and (reason != before or now - told > _TELL_S):
                tell(f"Slurm's job {self._id} waits: {reason}; an interrupt cancels it")
                before, told = reason, now
        if not self._granted:
            self._process.wait()
            self._readers[0].join()
            raise RuntimeError(f"Slurm refuses the job: {self._refusal()}")
        self._id, nodes, tasks = self._granted
        return dict(zip(_asked("scontrol", "show", "hostnames", nodes), _each(tasks), strict=True))

    def srun(self, host: str, pythons: tuple[str, ...]) -> list[str]:
        """Return the command that runs Python on a host of the job, once for all its workers."""
        return [
            *("srun", f"--jobid={self._id}", "--nodes=1", "--ntasks=1", f"--nodelist={host}"),
            *("--overlap", "--cpu-bind=none", "--chdir=/", *first_python(pythons)),
        ]

    def explained(self, link: Link) -> str:
        """Return why a host did not answer, and the next step."""
        typed = f"srun --nodelist={link.host} hostname"
        if why := self.ended():
            return why
        if link.alive:
            return f"no answer within {checks.ANSWERED_S:g} s; type {typed} and see what it does"
        words = [word for word in link.words if "error" in word]
        reason = (words or link.words or ["without a message"])[0].removeprefix("srun: error: ")
        return f"srun ended: {reason}; type {typed} in a terminal"

    def ended(self) -> str:
        """Return how Slurm ended the job; "" while it runs."""
        until = time.monotonic() + _COMPLETING_S
        state, reason = self._state()
        while state == "COMPLETING" and time.monotonic() < until:
            time.sleep(_POLL_S)
            state, reason = self._state()
        if state in ("RUNNING", "PENDING", "CONFIGURING", "COMPLETED", ""):
            return ""
        if state == "COMPLETING" and reason == "TimeLimit":
            state = "TIMEOUT"
        step = {
            "TIMEOUT": "ask for more by --time",
            "NODE_FAIL": "a host of it failed; sinfo -R says why",
            "CANCELLED": "somebody canceled it",
        }.get(state, f"Slurm's reason: {reason}")
        return f"Slurm ended job {self._id}: {state} ({step})"

    def _state(self) -> tuple[str, str]:
        """Return the state and the reason of the job; "" if they are unknown."""
        try:
            shown = " ".join(_asked("scontrol", "show", "job", str(self._id), "--oneliner"))
        except RuntimeError:  # the controller does not answer, or has forgotten the job
            return "", ""
        found = dict(re.findall(r"(JobState|Reason)=(\S+)", shown))
        return found.get("JobState", ""), found.get("Reason", "")

    def release(self) -> None:
        """Give the hosts back, or cancel the request; a second call does nothing."""
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is None:
                assert self._process.stdin is not None
                self._process.stdin.close()  # ends the command of a job that runs
                if not self._granted:
                    continue
            else:
                self._process.send_signal(number)
            try:
                self._process.wait(_TO_END_S)
                break
            except subprocess.TimeoutExpired:
                continue
        for reader in self._readers:
            reader.join(_TO_END_S)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def _waits(self) -> str:
        """Return Slurm's reason why the job waits; "" if there is none."""
        try:
            told = _asked("squeue", "-h", "-j", str(self._id), "-t", "PENDING", "-o", "%R")
        except RuntimeError as error:
            return str(error)
        reason = told[0] if told else ""
        if reason in ("", "(None)", "None"):
            return ""
        chosen = ("-p", self._asked.partition) if self._asked.partition else ()
        rows = dict.fromkeys(_asked("sinfo", "-h", "-N", *chosen, "-t", "down,drain", "-o", _DOWN))
        return "; ".join([reason, *rows])

    def _refusal(self) -> str:
        words = [word.removeprefix("salloc: ").removeprefix("error: ") for word in self._words]
        told = [word for word in words if word and not word.startswith(("Try ", "Usage"))]
        reason = told[-1] if told else "salloc ended without a message"
        return (
            f"{reason.removeprefix('Job submit/allocate failed: ')}; correct the options "
            f"({shlex.join(self._asked.options) or 'none were given'}), or see sinfo for what "
            "there is"
        )

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(facts.GREETING):  # not what a prolog of the site says
                self._granted = line.removeprefix(facts.GREETING).split()
                self._answered.set()
        self._answered.set()

    def _hear_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._words.append(line.strip())
            if found := re.search(r"job allocation (\d+)", line):
                self._id = found[1]


def _located(hosts: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the problems of hosts, and this machine's address for each of the others."""
    problems, sources = {}, {}
    for line in _asked("scontrol", "show", "node", ",".join(hosts), "--oneliner"):
        found: dict[str, str] = dict(re.findall(r"(NodeName|NodeAddr)=(\S+)", line))
        host = found["NodeName"]
        place = found.get("NodeAddr", host)
        try:
            sources[host] = checks.source(place, _PORT)
        except OSError as error:
            problems[host] = (
                f"Slurm's name for it, {place!r}, does not resolve here ({error.strerror}); name "
                "this machine's address for it by --address"
            )
    return problems, {host: each for host, each in sources.items() if each}


def _each(tasks: str) -> list[int]:
    """Return the tasks of each host: "2(x3),1" is [2, 2, 2, 1]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    return [int(number) for number, times in found for _ in range(int(times or 1))]


def _environment() -> dict[str, str]:
    """Return the environment for Slurm's commands, without that of a job in which this runs."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }


def _asked(*words: str) -> list[str]:
    """Return the lines that one of Slurm's commands prints.

    Raises:
        RuntimeError: If it does not answer.
    """
    try:
        told = subprocess.run(
            words, capture_output=True, text=True, timeout=_ANSWER_S, env=_environment()
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_ANSWER_S:g} s"
    else:
        if not told.returncode:
            return told.stdout.splitlines()
        reason = (told.stderr.strip().splitlines() or ["no message"])[-1]
    raise RuntimeError(
        f"Slurm does not answer {words[0]}: {reason}; type scontrol ping to see whether its "
        "controller runs"
    )
