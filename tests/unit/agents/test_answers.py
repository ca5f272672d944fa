"""What an environment may answer, and the sentences about all else."""

from nemo_style_rlhf.agents.environment import Observation
from tests.unit.agents.episodes import Run, config, line_of

ANSWERS = [
    ("5", "answered with 5, expected an Observation"),
    ("{'observation': 'x'}", "answered with {'observation': 'x'}, expected an Observation"),
    ("Observation(5)", "answered with messages=5, expected a list of messages, a text, or a list of token ids"),
    ("Observation(['a'])", "answered with messages=['a'], expected a list of messages, a text, or a list of token ids"),
    (
        "Observation([1, True])",
        "answered with messages=[1, True], expected a list of messages, a text, or a list of token ids",
    ),
    ("Observation([-1])", "answered with messages=[-1], expected a list of messages, a text, or a list of token ids"),
    (
        "Observation([{'content': 'x'}])",
        "answered with messages={'content': 'x'}, expected messages with a role, and a content that is text or parts of text",
    ),
    (
        "Observation([{'role': 'user', 'content': 'x', 'at': {1}}])",
        "answered with messages=[{'role': 'user', 'content': 'x', 'at': {1}}], which JSON cannot express (Object of type set is "
        "not JSON serializable), expected texts and numbers",
    ),
    (
        r"Observation('\ud800')",
        r"answered with messages='\ud800', which JSON cannot express ('utf-8' codec can't encode character '\ud800' in position 2"
        ": surrogates not allowed), expected texts and numbers",
    ),
    ("Observation('x' * 17_000_000)", "answered with 17000014 bytes, expected at most 16777216"),
    ("Observation(reward='1')", "answered with reward='1', expected a finite number"),
    ("Observation(reward=None)", "answered with reward=None, expected a finite number"),
    ("Observation(reward=float('nan'))", "answered with reward=nan, expected a finite number"),
    ("Observation(reward=10**400)", f"answered with reward=1{'0' * 59}..., expected a finite number"),
    ("Observation(done=1)", "answered with done=1, expected True or False"),
    ("Observation(score=float('inf'))", "answered with score=inf, expected a finite number"),
    ("Observation(metrics=[1])", "answered with metrics=[1], expected a dict of numbers by name"),
    ("Observation(metrics={'a': float('nan')})", "answered with metrics['a']=nan, expected a finite number"),
    (
        "Observation(sampling={'temperature': 1})",
        "answered with sampling={'temperature': 1}, expected a dict with the keys max_length and stop at most",
    ),
    (
        "Observation(sampling={'max_length': 0})",
        "answered with sampling['max_length']=0, expected a number of tokens above 0",
    ),
    (
        "Observation(sampling={'stop': 'x'})",
        "answered with sampling['stop']='x', expected a list of texts that are not empty",
    ),
]


def test_answers_that_are_no_observations_are_named(tmp_path):
    with Run(config(tmp_path, attempts=1, step_timeout_s=60.0)) as run:
        run.play([f"give:{answer}" for answer, _ in ANSWERS])
    where = f"Environment.step of {tmp_path / 'my_env.py'} (line {line_of('async def step')})"
    sentences = [[each.reason for each in run.failed[number]] for number in range(len(ANSWERS))]
    assert sentences == [[f"{where} {said}: correct what it returns"] for _, said in ANSWERS]
    assert run.ended == {}


def test_reset_must_answer_too(tmp_path):
    with Run(config(tmp_path, attempts=1)) as run:
        run.play(["reset"])
    said = f"(line {line_of('async def reset')}) answered with None, expected an Observation: correct what it returns"
    assert [each.reason for each in run.failed[0]] == [f"Environment.reset of {tmp_path / 'my_env.py'} {said}"]


def test_numbers_of_numpy_are_numbers(tmp_path):
    given = "(lambda np: Observation(np.arange(3), np.float32(0.5), np.bool_(True), np.int64(2), {'max_length': np.int8(3), "
    given += "'stop': ('a',)}, {'m': np.array(1.5)}))(__import__('numpy'))"
    with Run(config(tmp_path)) as run:
        run.play([f"give:{given}"])
    sampling = {"max_length": 3, "stop": ["a"]}
    assert run.ended[0].observation == Observation((0, 1, 2), 0.5, True, 2.0, sampling, {"m": 1.5})
