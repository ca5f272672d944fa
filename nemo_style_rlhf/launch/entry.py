"""The common start of every entry point: compose, check, report a user's mistake in one sentence."""

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import NoReturn, TypeVar

from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.launch.collector import collect_rarely
from nemo_style_rlhf.launch.environment import has_nvidia, prepare
from nemo_style_rlhf.launch.interpreter import require_own_interpreter, started_for_this
from nemo_style_rlhf.launch.malloc import prepare_heap

if OURS := require_own_interpreter():  # before the first import that another Python lacks
    if not has_nvidia():
        prepare_heap()  # now, so that nothing is imported twice
    interrupt.listen()
    collect_rarely()

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_style_rlhf.errors import USER_ERROR_EXIT, UserError
from nemo_style_rlhf.launch import sweep
from nemo_style_rlhf.launch.composition import CONF_DIR, in_section, store_schemas
from nemo_style_rlhf.launch.limits import require_open_files
from nemo_style_rlhf.launch.overrides import is_override, override, readable
from nemo_style_rlhf.launch.program import CHECKED
from nemo_style_rlhf.launch.starting import starting
from nemo_style_rlhf.launch.usage import describe_keys, help_text
from nemo_style_rlhf.schema.base import build, idle_settings, keys, one_sentence
from nemo_style_rlhf.schema.paths import require_paths
from nemo_style_rlhf.schema.programs import PROGRAMS
from nemo_style_rlhf.schema.renamed import hint

HYDRA = (
    "hydra/help=program",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
)
"""Overrides of Hydra's own settings: it logs nothing, makes no folder, and prints our help."""
Schema = TypeVar("Schema")
# Else every start composes its configuration twice, the first time only to look for a hydra.mode.
Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]


def entry_point(
    schema: type[Schema], *, dry_run: str = "", no_sweep: str | Callable[[Schema], str] = ""
) -> Callable[[Callable[[Schema], None]], Callable[[], None]]:
    """Decorate ``main(config)`` into a command line with Hydra's overrides and ``--cfg job``, ``--help [KEY]`` and ``--dry-run``.

    The program's file in ``conf/`` starts from the dataclass ``schema``, so an unknown key or a wrong type is refused before
    anything loads. A :class:`UserError` is printed as one line and exits with 2; every other exception propagates with its
    traceback. The docstring of ``main`` begins ``--help``. With ``-m`` the program starts itself for one run after the other.

    Args:
        dry_run: for ``--help``, what ``--dry-run`` does after loading; empty for a program without one.
        no_sweep: the reason not to take ``-m``, or a function that returns it for a configuration; empty for none.
    """
    script, name = next((script, name) for script, (name, each) in PROGRAMS.items() if each is schema)

    def decorate(main: Callable[[Schema], None]) -> Callable[[], None]:
        @functools.wraps(main)
        def command_line() -> None:
            told = ""
            if not {"--help", "-h"}.isdisjoint(sys.argv):
                never = isinstance(no_sweep, str) and no_sweep != ""
                told = help_text(script, main.__doc__ or "", dry_run=dry_run, sweeps=not never)
            node = {"app_name": script, "header": "", "footer": "", "template": told}
            ConfigStore.instance().store(group="hydra/help", name="program", node=node)
            store_schemas(name)
            composed: list[DictConfig] = []
            overrides: list[list[str]] = []

            # Hydra only composes: what fails in our own work must not come out wrapped in its messages.
            @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)
            def compose(config: DictConfig) -> None:
                composed.append(config)
                overrides.append(list(HydraConfig.get().overrides.task))

            words = ["run.dry_run=true" if argument == "--dry-run" else argument for argument in sys.argv[1:]]
            help_at = words.index("--help") if "--help" in words else len(words)
            if asked := [word for word in words[help_at:] if not word.startswith("-") and "=" not in word]:
                try:
                    print(describe_keys(script, asked))
                except UserError as error:
                    refuse(str(error))
                return
            # argparse wants overrides in one piece; slurm/ puts some of its own around the user's words.
            words.sort(key=is_override)
            sweeps = bool({*sweep.WORDS} & {*words})
            os.environ["HYDRA_FULL_ERROR"] = "1"  # hand errors to us instead of printing several lines
            try:
                words = [
                    in_section(readable(word, sweeps=sweeps), name) if is_override(word) else word for word in words
                ]
                options = [word for word in words if not is_override(word)]
                for key in (word.partition("=")[0].lstrip("+~") for word in words[len(options) :]):
                    if renamed := hint(key, list(keys(schema))):  # Hydra's error would name only its section
                        raise UserError(f"{key}: {renamed}")
                sys.argv = [sys.argv[0], *options, *HYDRA, *words[len(options) :]]
                with TemporaryDirectory() as scratch:  # Hydra leaves a file for every sweep
                    if sweeps:
                        sys.argv.append(override("hydra.sweep.dir", scratch))
                    compose()
                if len(composed) > 1:
                    for config in composed:
                        checked = build(schema, config)
                        if reason := no_sweep if isinstance(no_sweep, str) else no_sweep(checked):
                            raise UserError(f"-m starts one run after the other {reason}")
                        require_paths(checked)
                    folders = [str(OmegaConf.select(config, "run.output_dir")) for config in composed]
                    kept = [option for option in options if option not in sweep.WORDS]
                    raise SystemExit(sweep.run_all(kept, overrides, folders))
                for config in composed:  # none after --help and --cfg
                    checked = build(schema, config)
                    require_paths(checked)
                    require_open_files()
                    device = OmegaConf.select(config, "run.device")
                    if device == "cpu":
                        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch, DeepSpeed and vLLM each look for themselves
                    if device == "cpu" or (device == "auto" and not has_nvidia()):
                        prepare_heap()
                    prepare()
                    if os.environ.get("RANK", "0") == "0" and CHECKED not in os.environ:
                        for sentence in idle_settings(checked):
                            print(f"warning: {sentence}", file=sys.stderr)
                    if device is not None:  # a program that computes
                        starting("loading libraries")
                    main(checked)
            except KeyboardInterrupt:
                interrupt.end()
            except UserError as error:
                refuse(str(error))
            except OmegaConfBaseException as error:
                refuse(one_sentence(error, schema))
            except HydraException as error:
                cause = error.__cause__ or error.__context__
                if isinstance(cause, OmegaConfBaseException):
                    refuse(one_sentence(cause, schema))
                refuse(" ".join(str(error).partition("Config search path:")[0].split()))

        return _ended_at_once(command_line) if OURS and started_for_this() else command_line

    return decorate


def _ended_at_once(run: Callable[[], None]) -> Callable[[], None]:
    """End the process after ``run`` as the interpreter would, but leave its memory to the kernel: freeing every object of every
    library takes a second."""

    @functools.wraps(run)
    def running() -> NoReturn:
        code: object = None
        try:
            run()
        except SystemExit as end:
            code = end.code
        except Exception:  # noqa: BLE001 as the interpreter does
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            code = 1
        if isinstance(code, str):
            print(code, file=sys.stderr)
        end_now(code if isinstance(code, int) else int(code is not None))

    return running


def end_now(code: int) -> NoReturn:
    """End the process with an exit code."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):  # the reader has seen enough
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse(sentence: str) -> NoReturn:
    """End the process for a user's mistake."""
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(USER_ERROR_EXIT)
