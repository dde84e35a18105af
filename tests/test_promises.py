"""Promises of the documents on files, disks and interrupts, each with the tests that keep it."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

import ortlab

ROOT: Final = Path(__file__).parents[1]
PROMISES: Final[Mapping[str, tuple[str, ...]]] = {
    # README.md
    "opens JupyterLab on loopback, with threads that leave a busy machine's cores to others": (
        "test_cli.py::test_lab",
    ),
    # docs/security.md
    "Runs, checkpoints, caches and the history are files of mode 0600 in folders of mode 0700": (
        "cluster/test_private_files.py::test_only_the_user_can_read_what_is_written",
        "notebook/test_privacy.py::test_what_is_kept_is_the_users_alone",
        "checkpoint/test_checkpoint.py::test_the_file_is_private_and_alone",
    ),
    "files that you name yourself, exports and tables for one, have the mode that your umask": (
        "test_promises.py::test_an_export_has_the_mode_of_the_umask",
    ),
    "start JupyterLab with `--KernelManager.transport_encryption=auto`": (
        "test_cli.py::test_lab",
        "notebook/test_privacy.py::test_another_user_cannot_fetch_a_graph",
    ),
    "What workers say is always encrypted": (
        "notebook/test_privacy.py::test_another_user_cannot_listen_to_workers",
    ),
    "it is on no command line and in no file of the host": (
        "cluster/test_hosts.py::test_no_secret_is_on_a_command_line",
    ),
    "The controller listens on the one address by which the hosts reach this machine": (
        "cluster/test_hosts.py::test_every_socket_is_on_loopback_or_on_the_one_address",
    ),
    # docs/failures.md
    "SIGTERM, a closed terminal or a lost ssh": (
        "training/test_run.py::test_a_signal_stops_the_run_in_order",
        "training/test_run.py::test_a_closed_terminal_stops_the_run_in_order",
        "cluster/test_training.py::test_a_signal_while_workers_start_stops_the_run",
    ),
    "a script under `nohup` goes on": (
        "training/test_run.py::test_a_script_under_nohup_goes_on_when_its_terminal_closes",
    ),
    "a script that ends (Ctrl-C in a terminal ends one)": (
        "training/test_run.py::test_python_that_ends_stops_the_run_in_order",
        "cluster/test_training.py::test_python_ends_the_run_before_its_workers",
    ),
    "`make demo` gives it a minute (`--KernelManager.shutdown_wait_time=60`)": (
        "test_cli.py::test_lab",
        "training/test_run.py::test_a_second_signal_leaves_the_last_step_its_time",
    ),
    "the first Ctrl-C, or press of the notebook's stop button, leaves it going and says so": (
        "training/test_run.py::test_interrupting_result",
        "training/test_run.py::test_interrupting_a_cell_that_awaits",
    ),
    "after half a minute a checkpoint is kept": (
        "training/test_failures.py::test_data_that_hangs_holds_the_run_until_it_comes",
    ),
    "such an end costs the run the steps since its last checkpoint": (
        "cluster/test_isolated.py::test_a_crash_of_native_code_costs_steps_alone",
    ),
    # docs/checkpoints.md
    "A full disk costs neither the run nor what was saved before": (
        "training/test_full_disk.py::test_a_run_ends_whenever_the_disk_becomes_full",
    ),
    "it stays in memory and is tried again until there is room": (
        "training/test_full_disk.py::test_a_disk_that_is_full_from_the_start",
        "training/test_full_disk.py::test_a_paused_run_is_saved_once_there_is_room",
    ),
    "`run.checkpoint(path)` saves the state elsewhere, and a run may resume from there": (
        "training/test_full_disk.py::test_a_run_resumes_from_a_checkpoint_elsewhere",
    ),
    "in `ORTLAB_HOME` where that disk is full": (
        "cluster/test_training.py::test_a_full_folder_for_temporary_files_costs_nothing",
    ),
    "Only a run that cannot even create its folder is refused": (
        "history/test_run_folder.py::test_a_folder_that_cannot_be_created_is_refused",
    ),
    "Every value is verified before the model, the random states or the loader change": (
        "training/test_forged_checkpoints.py::test_a_forged_value",
        "training/test_forged_checkpoints.py::test_forged_json",
        "training/test_forged_checkpoints.py::test_a_folder_with_a_forged_value",
    ),
    "Where the newest checkpoint is damaged, the one before it is used": (
        "training/test_checkpoint_writer.py::test_a_process_that_is_killed_loses_nothing",
    ),
    "processes killed at random points": (
        "training/test_checkpoint_writer.py::test_thirty_deaths",
        "training/test_checkpoint_writer.py::test_thirty_deaths_of_kernels_with_workers",
    ),
}


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_is_made_and_tested(promise: str) -> None:
    said = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    said.append((ROOT / "README.md").read_text(encoding="utf-8"))
    assert any(promise in " ".join(text.split()) for text in said), "the documents say otherwise"
    for test in PROMISES[promise]:
        file, name = test.split("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        found = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
        assert name in found, f"no test {test}"


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_an_export_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        ortlab.export(nn.Linear(4, 2), tmp_path / "out", torch.ones(2, 4))
    finally:
        os.umask(before)
    written = [each for each in (tmp_path / "out").rglob("*") if each.is_file()]
    assert "model.onnx" in {each.name for each in written}
    assert {stat.S_IMODE(each.stat().st_mode) for each in written} == {0o640}
