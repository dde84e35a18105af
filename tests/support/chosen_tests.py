"""The tests that take long, and those of plain onnxruntime, by their place below tests/."""

from __future__ import annotations

LONG = (
    "test_notebooks.py",
    "engines/test_contract.py",
    "zoo/test_sweep.py",
    "cluster/test_training.py",
    "engines/distributed/test_deepspeed.py",
    "engines/distributed/test_ranks_in_ort.py",
    "engines/distributed/test_tensor_parallel.py",
    "engines/distributed/test_pipeline_parallel.py",
    "bench/test_bench.py",
    "search/test_race.py",
    "browser/test_ranks_in_lab.py",
    "browser/test_charts_in_lab.py",
    "training/test_resume.py",
    "browser/test_graphs_in_lab.py",
    "browser/test_panel_in_lab.py",
    "deploy/test_torchrun_script.py",
)
"""Files that take about a minute or more each, the longest first."""
SLOW = (
    "browser/",
    "cluster/",
    "deploy/test_torchrun_script.py",
    "engines/distributed/",
    "engines/ort/",
    "engines/ortmodule/",
    "engines/test_fuzz.py",
    "engines/test_keras.py",
    "graph/test_capture.py",
    "graph/test_captured.py",
    "graph/test_memory.py",
    "graph/test_planned_capture.py",
    "graph/test_profile_captured.py",
    "graph/test_recompute_plans.py",
    "graph/test_source_lines.py",
    "hf/",
    "metrics/test_rank_metrics.py",
    "metrics/test_recorder.py::test_a_million_steps",
    "notebook/test_bad_inputs.py",
    "notebook/test_kernel.py",
    "notebook/test_privacy.py",
    "notebook/views/test_charts.py",
    "search/",
    "test_keras.py",
    "test_other_systems.py",
    "test_torch_ort.py",
    "training/test_apply.py",
    "training/test_checkpoint_writer.py",
    "training/test_failures.py",
    "training/test_own_optimizers.py",
    "training/test_run.py",
    "training/test_toggles.py",
    "utils/test_warn_once.py",
)
"""Files, folders and tests that `make test` runs but not `make check`, in addition to `LONG`."""

PLAIN = (
    "cluster/test_isolated.py::test_it_trains_as_in_the_kernel[ort]",
    "cluster/test_training.py::test_a_run_moves_to_workers_and_back",
    "cluster/test_training.py::test_fifty_steps_in_ort",
    "browser/test_charts_in_lab.py::test_a_real_run_is_paused_and_stopped_while_it_is_awaited",
    "engines/distributed/test_ranks_in_ort.py",
    "engines/ort/",
    "engines/test_auto_engine.py",
    "engines/test_contract.py",
    "engines/test_fuzz.py",
    "engines/test_keras.py",
    "engines/test_outer_compile.py",
    "graph/test_captured.py",
    "graph/test_memory.py",
    "graph/test_planned_capture.py",
    "graph/test_profile_captured.py",
    "graph/test_source_lines.py",
    "notebook/test_kernel.py",
    "notebook/views/test_panel.py::test_memory_of_engine_ort",
    "test_cli.py",
    "test_keras.py",
    "test_notebooks.py::test_finetune_bert_beats_the_majority",
    "test_notebooks.py::test_first_run_shows_the_same_losses",
    "test_notebooks.py::test_runs_whole[01_",
    "test_notebooks.py::test_graphs_answers_its_questions",
    "test_notebooks.py::test_runs_whole[02_",
    "test_notebooks.py::test_runs_whole[03_",
    "test_notebooks.py::test_runs_whole[04_",
    "test_notebooks.py::test_runs_whole[05_",
    "test_notebooks.py::test_runs_whole[10_",
    "test_notebooks.py::test_turn_the_knobs_changes_a_run_and_settles_on_settings",
    "test_torch_ort.py",
    "zoo/test_sweep.py",
)
"""Tests that run again with plain onnxruntime, in `make plain`."""

RULES = (
    "cluster/test_isolated.py::test_it_trains_as_in_the_kernel[ort]",
    "cluster/test_training.py::test_a_run_moves_to_workers_and_back[ort]",
    "cluster/test_training.py::test_fifty_steps_in_ort[0-ort]",
    "cluster/test_training.py::test_fifty_steps_in_ort[1-ort]",
    "cluster/test_training.py::test_fifty_steps_in_ort[2-ort]",
    "engines/distributed/test_ranks_in_ort.py",
    "engines/ort/",
    "engines/test_keras.py",
    "graph/test_captured.py",
    "graph/test_memory.py::test_a_decoder_has_two_lengths[ort]",
    "graph/test_memory.py::test_a_step_takes_what_was_predicted[ort]",
    "graph/test_planned_capture.py",
    "graph/test_profile_captured.py",
    "graph/test_source_lines.py",
    "notebook/test_kernel.py",
    "test_keras.py",
    "test_notebooks.py::test_finetune_bert_beats_the_majority",
    "test_notebooks.py::test_runs_whole[02_",
    "test_notebooks.py::test_runs_whole[04_",
    "test_notebooks.py::test_turn_the_knobs_changes_a_run_and_settles_on_settings",
    "zoo/test_sweep.py",
)
"""Tests of `PLAIN` that run with the session of onnxruntime-training in `make nightly` alone."""

OF_ORT = ("engines/test_contract.py", "test_torch_ort.py")
"""Files whose tests of the engines ``ort`` and ``compile`` do so, too."""

FROZEN = (
    "engines/ortmodule/compat/test_patches.py",
    "engines/ortmodule/kernels/",
    "engines/ortmodule/test_fingerprint.py",
    "engines/ortmodule/test_graph_in_next_kernel.py",
    "graph/test_memory.py::test_a_step_takes_what_was_predicted[ortmodule]",
)
"""Tests of what will not change, onnxruntime-training's graphs and kernels: `make nightly`."""

LENGTHY = (
    "bench/test_claim_zero.py::test_zero_as_a_whole",
    "bench/test_claims.py::test_recompute_as_a_whole",
    "bench/test_bench.py::test_all_engines_by_the_command",
    "browser/test_charts_in_lab.py::test_a_kernel_that_says_nothing_is_told",
    "browser/test_graphs_in_lab.py::test_a_closed_view_leaves_no_graph_in_the_page",
    "cluster/test_training.py::test_shards_of_zero_3_load_under_tensor_parallelism",
    "engines/test_fuzz.py::test_random_graphs_are_right_or_refused",
    "engines/distributed/test_pipeline_parallel.py::test_four_ranks_are_one_process[data x stages",
    "engines/distributed/test_pipeline_parallel.py::test_data_pipeline_and_tensor_parallel_on_eight",
    "engines/distributed/test_tensor_parallel.py::test_data_and_tensor_parallel_on_four_ranks[",
    "training/test_resume.py::test_a_file_that_counts_micro_batches_is_read[a loader that shuffles",
    "training/test_resume.py::test_a_file_that_counts_micro_batches_is_read[a stream",
    "training/test_resume.py::test_the_place_in_the_data_is_found_again[workers that stay, a gen",
)
"""Further tests that run in `make nightly` alone, each longer than a third of a minute."""
