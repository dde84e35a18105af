"""Commands for this kernel, its status, help and workers, and for its machine."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from ortlab.api import check_setup, device, workers
from ortlab.engines import caches
from ortlab.notebook import privacy
from ortlab.notebook.magics.commands import command_called, overview
from ortlab.notebook.magics.reporting import progress
from ortlab.session import session
from ortlab.utils.contention import Contention

if TYPE_CHECKING:
    from ortlab.cluster.workers import Workers
    from ortlab.engines.doctor import Fact
    from ortlab.notebook.magics.parsing import ParsedCommand
    from ortlab.training.kernel_status import KernelStatus
    from ortlab.utils.findings import Finding
    from ortlab.utils.tables import Table


class MachineCommands:
    """One method per command, named like the command."""

    def __init__(self) -> None:
        self._contention = Contention()

    def status(self, given: ParsedCommand) -> KernelStatus:  # noqa: ARG002
        """Return the status of this kernel."""
        return session.status(*filter(None, [self._contention.warning()]))

    def help(self, given: ParsedCommand) -> None:
        """Print all commands, or the options of one."""
        name = given.words["command"]
        print(overview() if name is None else command_called(name).help)

    def workers(self, given: ParsedCommand) -> Workers | None:
        """Start, show or stop workers."""
        count, profile, hosts = (given.words[name] for name in ("count", "profile", "hosts"))
        if count is not None and count != "stop" and not count.isdecimal():
            raise UsageError(
                f"%ort workers: {count!r} is not a number; type %ort workers 2, or "
                "%ort workers stop"
            )
        if profile is not None and hosts is None and (count is None or count == "stop"):
            raise UsageError(
                "%ort workers: --profile needs a number of workers, as in --profile NAME 4"
            )
        own: dict[str, Any] = {
            "hosts": hosts,
            **_launched(given),
            "per_host": _number("--per-host", given.words["per_host"]),
            "python": given.words["python"],
            "address": given.words["address"],
        }
        chosen = any(value is not None for value in own.values())
        if count == "stop" and chosen:
            raise UsageError("%ort workers: stop ends all workers; it takes no options")
        for flag in ("slurm", "mpi"):
            number = _number(f"--{flag}", given.words[flag])
            if number is not None and count not in (None, str(number)):
                raise UsageError(f"%ort workers: {count} and --{flag} {number} are two numbers")
            count = count if number is None else str(number)
        if chosen or count not in (None, "stop"):
            with progress():
                return workers(None if count is None else int(count), profile=profile, **own)
        if session.workers is None:
            print("no workers yet; %ort workers 2 starts two")
            return None
        if count is None:
            return session.workers
        session.workers.stop()
        print("workers stopped")
        return None

    def cache(self, given: ParsedCommand) -> None:
        """Print or clear the cache of exported graphs."""
        clear = given.words["action"] == "clear"
        print(f"removed {caches.clear_graphs()}" if clear else caches.graphs())

    def device(self, given: ParsedCommand) -> Table[Fact]:  # noqa: ARG002
        """Return the hardware of this kernel."""
        exposed = privacy.exposure()
        return device() if exposed is None else device().noted(exposed)

    def doctor(self, given: ParsedCommand) -> Table[Finding]:  # noqa: ARG002
        """Return the checks of this machine."""
        return check_setup()


def _launched(given: ParsedCommand) -> dict[str, Any]:
    """Return the arguments of `workers` for --slurm and --mpi."""
    options = {name: given.words[name] for name in ("partition", "time", "account")}
    options = {name: value for name, value in options.items() if value is not None}
    for word in shlex.split(given.words["slurm_options"] or ""):
        name, mark, value = word.removeprefix("--").partition("=")
        if not name or name.startswith("-"):
            raise UsageError(
                f"%ort workers: --slurm-options takes options such as gres=gpu:2, not {word!r}"
            )
        options[name] = value if mark else True
    if options and given.words["slurm"] is None:
        raise UsageError(f"%ort workers: --{next(iter(options))} needs --slurm NUMBER")
    by_slurm = {} if given.words["slurm"] is None else {"slurm": options}
    return by_slurm if given.words["mpi"] is None else {**by_slurm, "mpi": True}


def _number(flag: str, text: str | None) -> int | None:
    if text is not None and not text.isdecimal():
        raise UsageError(f"%ort workers: {flag} takes a number, not {text!r}")
    return None if text is None else int(text)
