"""The recorder as a training loop uses it: what a run leaves behind, and what cannot stop it."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from megatron_ext.report import notices
from megatron_ext.report.config import ReportConfig
from megatron_ext.report.metrics import read_metrics
from megatron_ext.report.notices import warn_once
from megatron_ext.report.recorder import RunRecorder, with_throughput
from megatron_ext.report.sink import RunStopped


def open_recorder(folder, *, resume_step=None, is_writer=True, **choices) -> RunRecorder:
    quiet = {
        "progress_interval_seconds": 0.0,
        "report_html": False,
        "tensorboard_events": False,
    }
    choices = {**quiet, **choices}
    return RunRecorder(
        ReportConfig(output_dir=str(folder), **choices),
        is_writer=is_writer,
        options={"lr": 0.1},
        total_steps=6,
        resume_step=resume_step,
    )


def metrics_of(step: int) -> dict[str, float]:
    return {"loss": -0.5 * step, "tokens": 100, "seconds": 0.5}


def log_steps(recorder: RunRecorder, steps: range) -> None:
    for step in steps:
        recorder.log(step, metrics_of(step))


def test_a_run_leaves_metrics_options_events_and_a_page(tmp_path):
    with open_recorder(
        tmp_path,
        tensorboard_events=True,
        report_html=True,
        report_interval_seconds=0,
        run_title="My run",
    ) as recorder:
        log_steps(recorder, range(1, 7))

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "metrics.jsonl", "report.html", "tensorboard"]
    want = {step: {"tokens_per_second": 200.0, **metrics_of(step)} for step in range(1, 7)}
    assert dict(read_metrics(tmp_path / "metrics.jsonl")) == want
    assert json.loads((tmp_path / "config.json").read_text())["options"] == {"lr": 0.1}
    page = (tmp_path / "report.html").read_text()
    assert "<title>My run</title>" in page
    assert "Finished at step 6 of 6" in page
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_a_resumed_run_leaves_what_an_uninterrupted_one_does(tmp_path):
    with open_recorder(tmp_path / "whole") as recorder:
        log_steps(recorder, range(1, 7))
    log_steps(open_recorder(tmp_path / "resumed"), range(1, 5))  # as if killed: nothing is closed

    page = {"report_html": True, "report_interval_seconds": 0}
    with open_recorder(tmp_path / "resumed", resume_step=2, **page) as recorder:
        log_steps(recorder, range(3, 7))

    whole, resumed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "resumed"))
    assert resumed.read_bytes() == whole.read_bytes()
    report = (tmp_path / "resumed" / "report.html").read_text()
    assert "<td>-0.5</td><td><b>-3</b></td>" in report  # first and last loss of the whole run


def test_steps_missing_before_a_resume_are_warned_about(tmp_path, caplog):
    log_steps(open_recorder(tmp_path), range(1, 3))
    open_recorder(tmp_path, resume_step=4)
    assert "ends at step 2 but the run resumes from step 4" in caplog.text


def test_r12_missing_metrics_are_said_once_and_in_the_report(tmp_path, caplog):
    with open_recorder(tmp_path, resume_step=2, report_html=True) as recorder:
        log_steps(recorder, range(3, 5))
    said = [record.message for record in caplog.records]
    assert "metrics.jsonl is incomplete, and the run goes on: it has no step" in said[0]
    assert "metrics.jsonl lacks 2 steps (1 to 2): it has no step but" in said[1]
    assert len(said) == 2
    assert "The record is incomplete:" in (tmp_path / "report.html").read_text()
    [gap] = json.loads((tmp_path / "config.json").read_text())["gaps"]
    assert gap.startswith("metrics.jsonl lacks 2 steps")


def test_r12_rollouts_without_metrics_are_moved_aside_not_cut(tmp_path):
    (tmp_path / "rollouts.jsonl").write_text("an earlier run\n")
    open_recorder(tmp_path)
    assert (tmp_path / "previous-1" / "rollouts.jsonl").read_text() == "an earlier run\n"


def test_r6_metrics_wait_for_a_disk_that_is_full(tmp_path, caplog):
    """R6: one warning names the file and the reason, the run goes on, nothing is lost."""
    path = tmp_path / "metrics.jsonl"
    with open_recorder(tmp_path) as recorder:
        recorder.log(1, {"loss": 1.0})
        path.rename(tmp_path / "kept")
        path.symlink_to("/dev/full")
        log_steps(recorder, range(2, 5))
        path.unlink()
        (tmp_path / "kept").rename(path)
        recorder.log(5, {"loss": 0.0})
    assert [step for step, _ in read_metrics(path)] == [1, 2, 3, 4, 5]
    [said] = [record.message for record in caplog.records]
    assert "metrics.jsonl is incomplete, and the run goes on: step 2 " in said
    assert "No space left on device" in said
    assert json.loads((tmp_path / "config.json").read_text())["gaps"] == []


def test_r6_a_disk_that_stays_full_is_in_the_report(tmp_path, caplog):
    with open_recorder(tmp_path, report_html=True, tensorboard_events=True) as recorder:
        for name in ("metrics.jsonl", "tensorboard"):
            (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        (tmp_path / "tensorboard").touch()  # a file where the events' folder belongs
        log_steps(recorder, range(1, 4))
    said = [record.message for record in caplog.records]
    assert [sum(name in text for text in said) for name in ("metrics.jsonl is", "tensorboard")] == [
        1,
        1,
    ]
    assert "metrics.jsonl lacks 3 steps (1 to 3)" in said[-1]
    assert "metrics.jsonl lacks 3 steps (1 to 3)" in (tmp_path / "report.html").read_text()


def test_r8_a_run_that_was_stopped_says_so_and_why(tmp_path):
    with pytest.raises(RunStopped), open_recorder(tmp_path, report_html=True) as recorder:
        recorder.log(1, {"loss": 1.0})
        assert json.loads((tmp_path / "config.json").read_text())["status"] == "running"
        assert "the run was killed" in (tmp_path / "report.html").read_text()
        raise RunStopped("SIGTERM came", exit_code=143)
    page = (tmp_path / "report.html").read_text()
    assert "Stopped at step 1 of 6" in page and "SIGTERM came" in page
    assert "the run was killed" not in page and "refresh" not in page
    record = json.loads((tmp_path / "config.json").read_text())
    assert (record["status"], record["reason"]) == ("stopped", "SIGTERM came")


def test_r8_the_step_of_a_resume_can_be_completed(tmp_path):
    log_steps(open_recorder(tmp_path), range(1, 4))
    with open_recorder(tmp_path, resume_step=2) as recorder:
        assert recorder.resumed_metrics["loss"] == -1.0
        recorder.amend(2, {"eval_pass_rate": 0.5})
        log_steps(recorder, range(3, 4))
    lines = dict(read_metrics(tmp_path / "metrics.jsonl"))
    assert lines[2] == {**lines[2], "eval_pass_rate": 0.5, "loss": -1.0}
    assert sorted(lines) == [1, 2, 3]


def test_a_new_run_starts_afresh(tmp_path):
    for _ in range(2):
        with open_recorder(tmp_path) as recorder:
            log_steps(recorder, range(1, 3))
    assert [step for step, _ in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "previous-1" / "metrics.jsonl").exists()


def test_a_process_that_is_not_the_writer_does_nothing(tmp_path):
    folder = tmp_path / "out"
    with open_recorder(folder, is_writer=False) as recorder:
        log_steps(recorder, range(1, 3))
    assert not folder.exists()


def test_without_an_output_folder_there_is_only_the_progress(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with RunRecorder(ReportConfig(), is_writer=True, options={}, total_steps=2) as recorder:
        log_steps(recorder, range(1, 3))
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.splitlines()[-1].startswith("step 2/2  loss -1  200 tokens/s")


def test_an_error_ends_the_run_as_failed_and_goes_on_up(tmp_path):
    with pytest.raises(KeyError), open_recorder(tmp_path, report_html=True) as recorder:
        recorder.log(1, {"loss": 1.0})
        raise KeyError("no <such> thing")
    page = (tmp_path / "report.html").read_text()
    assert "Failed at step 1 of 6" in page
    assert "KeyError: &#x27;no &lt;such&gt; thing&#x27;" in page
    assert "test_recorder.py" in page  # the traceback


def test_a_plain_exit_is_no_failure(tmp_path):
    with pytest.raises(SystemExit), open_recorder(tmp_path, report_html=True) as recorder:
        recorder.log(1, {"loss": 1.0})
        sys.exit(0)
    assert "Finished at step 1 of 6" in (tmp_path / "report.html").read_text()


def test_a_page_that_cannot_be_written_is_warned_about_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    (tmp_path / "report.html").mkdir()  # a folder in the way: the page cannot replace it
    with open_recorder(tmp_path, report_html=True) as recorder:  # drawn twice, first and last
        for step in range(1, 4):
            recorder.log(step, {"loss": 1.0})
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "LivePage cannot show the metrics" in caplog.text


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_is_logged_once_and_in_order(tmp_path, step):
    recorder = open_recorder(tmp_path)
    recorder.log(2, {"loss": 1.0})
    with pytest.raises(ValueError, match=rf"step {step} was logged after step 2"):
        recorder.log(step, {"loss": 1.0})


def test_wandb_that_is_not_installed_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"--wandb-project p needs .*pip install wandb"):
        RunRecorder(
            ReportConfig(output_dir=str(tmp_path), progress_interval_seconds=0.0),
            is_writer=True,
            options={},
            total_steps=None,
            wandb_project="p",
        )


def test_wandb_needs_an_output_folder():
    with pytest.raises(ValueError, match=r"--wandb-project p needs --output-dir"):
        RunRecorder(
            ReportConfig(), is_writer=False, options={}, total_steps=None, wandb_project="p"
        )


def test_throughput_is_added_where_it_can_be():
    assert with_throughput({"tokens": 10, "seconds": 4.0})["tokens_per_second"] == 2.5
    assert "tokens_per_second" not in with_throughput({"tokens": 10, "seconds": 0})
    assert with_throughput({"loss": 1.0}) == {"loss": 1.0}


def test_impossible_choices_are_refused_together():
    with pytest.raises(
        ValueError, match=r"(?s)--report-interval-seconds -1 .*--progress-.* nan .*dir"
    ):
        ReportConfig(
            report_interval_seconds=-1, progress_interval_seconds=float("nan"), output_dir=" "
        )


def test_a_warning_is_said_once_and_by_one_rank(caplog):
    for rank in (1, 0, 0):
        warn_once("test_a_warning: something to know", rank=rank)
    warn_once("test_a_warning: loss was 3", key="test_a_warning: loss")
    warn_once("test_a_warning: loss was 4", key="test_a_warning: loss")
    assert [record.message for record in caplog.records] == [
        "test_a_warning: something to know",
        "test_a_warning: loss was 3",
    ]
