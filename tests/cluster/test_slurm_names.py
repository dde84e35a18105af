"""Tests of what can be said about a job of Slurm before Slurm is asked."""

from __future__ import annotations

from typing import Any

import pytest

import ortlab
from ortlab.cluster import facts
from ortlab.cluster.slurm import SlurmJob, _each
from tests.support.typed_magics import Typist


@pytest.mark.parametrize(
    ("tasks", "each"),
    [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2])],
)
def test_tasks_of_each_host(tasks: str, each: list[int]) -> None:
    assert _each(tasks) == each


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": None}, "slurm needs a number of workers, as in --slurm 4, not None"),
        ({"count": 0}, "slurm needs a number of workers, as in --slurm 4, not 0"),
        ({"count": 5, "per_host": 2}, "5 workers cannot be 2 on each host; start 4, or"),
        ({"count": 4, "per_host": 0}, "4 workers cannot be 0 on each host"),
        ({"count": 4, "options": {"ntasks": 8}}, "Slurm's option --ntasks follows from the number"),
        ({"count": 4, "address": "0.0.0.0"}, "would open the controller to every network"),
    ],
)
def test_impossible_jobs_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlurmJob.chosen(**{"options": {}, "per_host": None, **given})


def test_it_can_be_typed_again() -> None:
    options = {"partition": "gpu", "comment": "x y", "exclusive": True, "mem_per_cpu": "2G"}
    job = SlurmJob.chosen(options, 4, 2)
    assert job.options == ("--partition=gpu", "--comment=x y", "--exclusive", "--mem-per-cpu=2G")
    assert job.typed.startswith("--slurm 4 --per-host 2 --slurm-options ")
    assert job.called == (
        "4, per_host=2, slurm={'partition': 'gpu', 'comment': 'x y', 'exclusive': True, "
        "'mem-per-cpu': '2G'}"
    )
    assert SlurmJob.chosen({}, 4, None).called == "4, slurm=True"


def test_the_magic_says_what_its_options_need(ip: Typist) -> None:
    assert "--slurm takes a number, not 'x'" in ip.refused("%ort workers --slurm x")
    assert "--partition needs --slurm NUMBER" in ip.refused("%ort workers 2 --partition gpu")
    assert "2 and --slurm 3 are two numbers" in ip.refused("%ort workers 2 --slurm 3")
    assert "it takes no options" in ip.refused("%ort workers stop --slurm 3")
    assert "slurm excludes hosts and mpi" in ip.refused("%ort workers --slurm 2 --hosts a")
    assert "a profile names its own hosts" in ip.refused("%ort workers 2 --slurm 2 --profile x")
    assert "takes options such as gres=gpu:2, not '-p'" in ip.refused(
        "%ort workers --slurm 2 --slurm-options '-p gpu'"
    )
    with pytest.raises(ValueError, match="slurm needs a number of workers"):
        ortlab.workers(slurm=True)


def test_the_versions_of_hosts_include_onnxruntime() -> None:
    ours = facts.facts()["versions"]
    assert "onnxruntime" in ours
    theirs, here = facts.different({**ours, "onnxruntime": "1.2.3"}) or ("", "")
    assert theirs == "onnxruntime 1.2.3"
    assert here in (f"onnxruntime {ours['onnxruntime']}", "no onnxruntime")
