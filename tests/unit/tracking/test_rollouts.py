"""Samples on disk."""

import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from nemo_style_rlhf.models.decoding import backend, decoder_loader
from nemo_style_rlhf.ppo.recording import step_samples
from nemo_style_rlhf.schema.tracking import RolloutsConfig
from nemo_style_rlhf.tracking import rollout_files
from nemo_style_rlhf.tracking.rollout_files import compact, jsonl, read_rows, rewind, write_step
from nemo_style_rlhf.tracking.rollouts import RolloutWriter
from nemo_style_rlhf.tracking.sample_files import sample_files
from tests.support.models import save_tokenizer
from tests.support.paths import ROOT
from tests.support.rollout_files import SCHEMA
from tests.support.rollouts import UnluckyScorer, collect


def test_what_a_failed_sample_lacks_is_null_on_disk(tmp_path):
    """The process that writes needs the folder and the tokenizer only. Readers of JSON Lines other than Python's refuse NaN."""
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    experience = collect(scorer=UnluckyScorer())
    failed = experience.scores.failures
    experience.scores.extra["length"] = torch.where(failed, torch.nan, 3.0)
    folder = tmp_path / "rollouts"
    load = decoder_loader(tokenizer, str(tmp_path), trust_remote_code=False)
    writer = RolloutWriter(folder, RolloutsConfig(), load, backend(tokenizer))
    writer.rewind(0)
    for step in (1, 2):
        writer.write(step_samples(step, experience, None))
    writer.flush()
    writer.close()
    rows = [json.loads(jsonl(row)) for row in read_rows(folder)]
    assert [row["step"] for row in rows] == [1] * len(failed) + [2] * len(failed)
    rows = rows[: len(failed)]
    lacking = [row["reward"] is None and row["score/length"] is None for row in rows]
    assert lacking == failed.tolist() == [row["failed"] for row in rows] and any(lacking) and not all(lacking)
    assert [row["response"] for row in rows] == [tokenizer.decode(r.response_tokens) for r in experience.rollouts]
    assert [row["response_tokens"] for row in rows] == [len(r.response_tokens) for r in experience.rollouts]
    assert json.loads((folder / "tokenizer.json").read_text()) == json.loads(tokenizer.backend_tokenizer.to_str())


@pytest.mark.parametrize("lacking", [[0], [3, 4], [39], [0, 1, 38, 39], list(range(40))])
def test_a_sample_without_a_response_counts_for_nothing(tmp_path, lacking):
    """As a failed episode is; those beside it keep their numbers."""
    experience = collect()
    parts = experience.mask.split(experience.lengths)
    for row in lacking:
        whole = experience.rollouts[row]
        experience.rollouts[row] = replace(whole, turns=(), status="failed", response_mask=whole.response_mask & False)
        parts[row].zero_()
    samples = step_samples(3, experience, None)
    rows = list(read_rows_of(tmp_path, samples))
    assert [row["learned_tokens"] for row in rows] == [int(part.sum()) for part in parts]
    for number, row in enumerate(rows):
        if number in lacking:
            assert row["kl_sum"] is row["advantage_mean"] is None
            assert (row["turns"], row["mask"], row["finish_reason"]) == ([], [], "failed")
            assert (row["response_tokens"], row["weights_version"]) == (0, -1)
        else:
            assert row["learned_tokens"] == len(row["mask"]) == row["response_tokens"]
            assert row["weights_version"] == 0


def read_rows_of(folder, samples):
    write_step(folder, samples, ["text"] * len(samples.lengths))
    return read_rows(folder)


def test_every_number_stands_at_its_token(tmp_path):
    """Against the Experience, token by token: entry t of its tensors describes the action that leads to token t+1."""
    experience = collect(scorer=UnluckyScorer())
    new_logprobs = experience.logprobs + 0.25
    write_step(tmp_path, step_samples(3, experience, new_logprobs), ["text"] * len(experience.rollouts))
    start = 0
    for row, rollout, length in zip(read_rows(tmp_path), experience.rollouts, experience.lengths, strict=True):
        first = rollout.turns[0].start
        assert row["tokens"] == rollout.tokens.tolist() and row["prompt_tokens"] == first
        assert row["turns"] == [{"start": first, "end": length, "finish_reason": rollout.finish_reason}]
        assert row["weights_versions"] == rollout.weights_version[first:].tolist()
        actions = slice(start + first - 1, start + length - 1)
        learned = experience.mask[actions].bool().tolist()
        assert row["mask"] == learned and row["learned_tokens"] == sum(learned)
        assert row["ref_logprobs"] == experience.ref_logprobs[actions].tolist()
        for name in ("kl", "rewards", "advantages", "returns"):
            expected = getattr(experience, name)[actions].tolist()
            assert row[name] == [value if known else None for value, known in zip(expected, learned)]
        assert row["ratios"] == pytest.approx([math.exp(0.25) if known else None for known in learned])
        if sum(learned):
            kl = experience.kl[actions]
            summary = [row["kl_sum"], row["kl_mean"], row["kl_max"], row["ratio_max"]]
            assert summary == pytest.approx([float(kl.sum()), float(kl.mean()), float(kl.max()), math.exp(0.25) - 1])
        else:
            assert row["kl_sum"] is None and row["ratio_max"] is None and row["failed"]
        start += length


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(rollout_files, "BLOCK", 4)


def write_steps(folder, steps, keep=0):
    """Returns the warnings."""
    experience, warnings = collect(), []
    for step in steps:
        experience.scores.extra.clear()
        experience.scores.extra[f"score of {step % 3}"] = experience.scores.rewards  # columns differ between steps
        samples = step_samples(step, experience, None)
        write_step(folder, samples, [f"response {step}.{row}" for row in range(len(samples.lengths))])
        warnings += compact(folder, keep)
    return warnings


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def responses(folder):
    return [row["response"] for row in read_rows(folder)]


def test_old_steps_are_merged_and_nothing_changes_for_readers(tmp_path, small_blocks):
    write_steps(tmp_path / "merged", range(1, 9))
    assert names(tmp_path / "merged") == [
        *(f"step_{step:06d}.parquet" for step in range(5, 9)),
        "steps_000001_000004.parquet",
    ]
    content = pq.ParquetFile(tmp_path / "merged" / "steps_000001_000004.parquet")
    assert content.num_row_groups == 4 and {f"score/score of {number}" for number in range(3)} <= {
        *content.schema_arrow.names
    }
    rows = list(read_rows(tmp_path / "merged"))
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    single = tmp_path / "single"
    for step in range(1, 9):
        write_steps(single, [step])
        (row, *_) = [each for each in rows if each["step"] == step]
        (alone, *_) = read_rows(single, step, step)
        assert {name: value for name, value in row.items() if name in alone} == alone
        next(single.iterdir()).unlink()


@pytest.mark.slow("writes files of many megabytes")
def test_a_resumed_run_finds_no_sample_of_a_step_that_it_repeats(tmp_path, small_blocks):
    """Whatever step it resumes from, the files are those of a run that only came so far, leftovers of a crash included."""
    for step in range(0, 9):
        folder, short = tmp_path / f"long_{step}", tmp_path / f"short_{step}"
        write_steps(folder, range(1, 9))
        (folder / "step_000003.parquet").write_bytes(
            (folder / "step_000007.parquet").read_bytes()
        )  # killed before its removal
        rewind(folder, step)
        short.mkdir()
        write_steps(short, range(1, step + 1))
        assert responses(folder) == responses(short), step
        write_steps(folder, range(step + 1, 9))
        assert sorted({row["step"] for row in read_rows(folder)}) == list(range(1, 9))


@pytest.mark.slow("writes files of many megabytes")
def test_old_samples_leave_the_disk_block_by_block(tmp_path, small_blocks):
    kept = []
    experience = range(1, 30)
    for step in experience:
        write_steps(tmp_path, [step], keep=6)
        kept.append(sum(file.last - file.first + 1 for file in sample_files(tmp_path)))
    assert kept[:6] == [1, 2, 3, 4, 5, 6] and min(kept[6:]) >= 6 and max(kept) < 6 + 4
    assert sorted({row["step"] for row in read_rows(tmp_path)})[-6:] == list(range(24, 30))


def test_every_nth_step_can_be_recorded():
    due = [step for step in range(1, 12) if RolloutsConfig(every=5).is_due(step)]
    assert due == [5, 10] and not any(RolloutsConfig(every=0).is_due(step) for step in itertools.chain(range(3), due))


def test_samples_are_exported_as_json_lines(tmp_path):
    folder = tmp_path / "run" / "actor" / "rollouts"
    folder.mkdir(parents=True)
    write_steps(folder, range(1, 4))

    def export(*words):
        command = [sys.executable, ROOT / "trainers" / "export_rollouts.py", *words]
        return subprocess.run(command, capture_output=True, text=True)

    done = export(tmp_path / "run", "--first", "2", "--last", "2")
    assert [json.loads(line) for line in done.stdout.splitlines()] == list(read_rows(folder, 2, 2)), done.stderr
    short = [json.loads(line) for line in export(tmp_path / "run", "--no-tokens").stdout.splitlines()]
    assert {row["step"] for row in short} == {1, 2, 3} and "tokens" not in short[0] and "response" in short[0]
    refused = export(tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "holds no rollouts" in refused.stderr


def test_the_columns_are_those_that_the_page_is_tested_with(tmp_path):
    write_steps(tmp_path, [1])
    written = pq.read_schema(next(tmp_path.iterdir()))
    assert {field.name: field.type for field in written if not field.name.startswith("score/")} == {
        field.name: field.type for field in SCHEMA
    }


DAMAGES = {
    "cut short": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "another file": lambda content: b"{}",
    "a bit": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_set_aside_and_recording_goes_on(tmp_path, small_blocks, damage):
    """Before it is merged, and after: a merged file that a resumed run has to shorten."""
    write_steps(tmp_path, range(1, 5))
    bad = tmp_path / "step_000002.parquet"
    bad.write_bytes(DAMAGES[damage](bad.read_bytes()))
    (warning,) = write_steps(tmp_path, range(5, 12))
    assert re.search(r"step_000002\.parquet cannot be read \(.+\): it is now damaged_step_000002\.parquet", warning)
    assert (tmp_path / "damaged_step_000002.parquet").exists()
    assert sorted({row["step"] for row in read_rows(tmp_path)}) == [1, *range(3, 12)]

    (merged,) = tmp_path.glob("steps_*.parquet")
    merged.write_bytes(DAMAGES[damage](merged.read_bytes()))
    (warning,) = rewind(tmp_path, 3)
    assert warning.startswith(str(merged)) and (tmp_path / f"damaged_{merged.name}").exists()
    assert list(read_rows(tmp_path)) == []


def test_a_recording_that_is_no_file_is_left_alone(tmp_path, small_blocks):
    write_steps(tmp_path, range(1, 4))
    os.mkfifo(tmp_path / "step_000004.parquet")
    write_steps(tmp_path, range(5, 12))
    assert sorted({row["step"] for row in read_rows(tmp_path)}) == [1, 2, 3, *range(5, 12)]


def test_the_death_of_the_process_that_records_ends_no_training(tmp_path, caplog):
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    load = decoder_loader(tokenizer, str(tmp_path), trust_remote_code=False)
    writer = RolloutWriter(tmp_path / "rollouts", RolloutsConfig(), load, None)
    writer.rewind(0)
    experience = collect()
    (recorder,) = writer._process._processes
    os.kill(recorder, signal.SIGKILL)
    for step in (1, 2, 3):
        writer.write(step_samples(step, experience, None))
        with contextlib.suppress(Exception):
            writer.writing.exception(20)
    writer.flush()
    writer.close()
    assert "the process that records samples has died" in caplog.text
    assert 3 in {row["step"] for row in read_rows(tmp_path / "rollouts")}
