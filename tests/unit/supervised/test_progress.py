"""The lines of a supervised stage in a log file."""

from types import SimpleNamespace

from nemo_style_rlhf.supervised import progress


def test_lines_come_now_and_then_also_while_gradients_accumulate(monkeypatch, capsys):
    """The first micro-batch may take longer than the period, while no step is done. Five steps of 65 s each take 5:25, three of
    82 / 3 s each 1:22."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    stage = progress.StageProgress("SFT", 10)
    trainer = SimpleNamespace(global_step=4, callback_metrics={"train/loss": 0.5})  # a resumed run
    stage.on_train_start(trainer, None)
    for seconds, step in [(60, 4), (5, 5), (5, 6), (5, 6), (7, 7)]:
        now[0] += seconds
        trainer.global_step = step
        stage.on_train_batch_end(trainer, None)
    stage.on_train_end(trainer, None)
    assert capsys.readouterr().err.splitlines() == [
        "SFT 5/10  loss 0.500  eta 5:25",
        "SFT 7/10  loss 0.500  eta 1:22",
    ]
