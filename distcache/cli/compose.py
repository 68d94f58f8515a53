"""From the command line to a checked `Config`: Hydra runs in one process per launch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from distcache.cli.run import INTERRUPTED, run_job, set_up_logging, take_over_ctrl_c, train_command
from distcache.comm.rendezvous import Place
from distcache.config import keys
from distcache.config.checks import as_words, check, read_units, refuse_if
from distcache.config.tree import Config
from distcache.errors import ConfigError, DistcacheError

PACKAGE = Path(__file__).resolve().parents[1]


def conf_dir(package: Path = PACKAGE) -> Path:
    """The folder of Hydra's groups and `train.yaml`, absolute.

    A wheel carries it as `distcache/conf`; in a checkout it is `conf` beside `package`.
    Raises ConfigError where neither is there.
    """
    places = [package / "conf", package.parent / "conf"]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        how = "reinstall distcache, or run it from a complete checkout"
        raise ConfigError(f"no configuration folder at {places[0]} or {places[1]}: {how}")
    return found


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Composed:
    """What came of the command line.

    `text`: the whole config tree as YAML, or None where there is nothing to run (`--help`,
    `--cfg job`, a sweep, an error); then `exit_code` says how every rank ends.
    """

    text: str | None
    exit_code: int = 0


def compose_command_line(place: Place) -> Composed:
    """Run Hydra over `sys.argv`.

    Raises ConfigError for what Hydra cannot compose, and for a sweep under several ranks or into
    one folder. A sweep of one rank runs here, each job in fresh processes.
    """
    if asks_for_sweep(sys.argv[1:]):
        refuse_if(
            place.world_size > 1,
            f"--multirun under torchrun would start every job of the sweep in each of "
            f"{place.world_size} ranks: run `python -m distcache.train --multirun "
            f"run.sweep_ranks={place.world_size} key=a,b ...` without torchrun; it starts each job "
            "with that many ranks, one job after the other",
        )
        for argument in sys.argv[1:]:
            one = f"{argument} in a sweep would put all jobs into one folder"
            how = "name the folder of the sweep with hydra.sweep.dir=<folder>"
            refuse_if(argument.startswith("run.dir="), f"{one}: {how}")
    _check_line(sys.argv[1:])
    configs: list[DictConfig] = []
    codes: list[int] = []

    def task(config: DictConfig) -> None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            codes.append(_run_sweep_job(config))
        else:
            configs.append(config)

    # Of `--help`, which shows the values that were composed.
    OmegaConf.register_new_resolver(
        "all_keys", lambda *, _root_: keys.usage_of_all(_root_), replace=True
    )
    _run_hydra("train", Config, task)
    return Composed(to_text(configs[0])) if configs else Composed(None, int(any(codes)))


def _run_hydra(command: str, schema: type, task: Callable[[DictConfig], None]) -> None:
    """Run Hydra over `sys.argv` with `conf/<command>.yaml`, every key and type of it checked
    against the tree `schema`.

    Raises ConfigError for every error of Hydra's own, and what `task` raises as it is.
    """
    ConfigStore.instance().store(name=f"{command}_schema", node=schema)
    task_errors: list[Exception] = []

    def watched_task(config: DictConfig) -> None:
        try:
            task(config)
        except Exception as error:
            task_errors.append(error)
            raise

    # Hydra prints its errors and exits, with a traceback where it did not expect them; with this
    # variable it raises them. Jobs of a sweep inherit it, which changes nothing for them.
    full_error = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    # Hydra's decorator is applied here so that importing this module touches no configuration.
    start = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=command)
    try:
        start(watched_task)()
    except Exception as error:
        if error in task_errors:
            raise
        raise composing_error(error, sys.argv[1:]) from error
    finally:
        if full_error is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = full_error


FULL_ERROR = "HYDRA_FULL_ERROR"
"""The variable with which Hydra raises its errors."""


def composing_error(error: Exception, arguments: Sequence[str]) -> ConfigError:
    """Return the error for `arguments` from which Hydra could make no configuration."""
    if isinstance(error, OmegaConfBaseException):
        return value_error(error)
    if isinstance(error, HydraException):
        return hydra_error(error)
    # Hydra did not expect it, so the text may name no override. Plain ones are checked before.
    given = get_args_parser().parse_args(list(arguments)).overrides
    doubtful = [text for text in given if not is_plain(_parsed(text))] or given
    reason = str(error).partition(" : Override(")[0]
    cause = ": ".join(filter(None, [type(error).__name__, reason]))
    return ConfigError(f"{' '.join(doubtful)}: Hydra does not take this ({cause})")


def hydra_error(error: HydraException) -> ConfigError:
    """Return the error for an override that Hydra refused, with the first line of its cause."""
    lines = str(error).splitlines()
    lines += str(error.__cause__ or "").splitlines()[:1]
    return ConfigError(": ".join(dict.fromkeys(line.strip() for line in lines if line.strip())))


T = TypeVar("T")


@dataclass(frozen=True)
class Line(Generic[T]):
    """A command line that was read: the `values` of the command's tree, the keys that it sets
    itself, and the overrides of keys that are not the command's own, as they were typed."""

    values: T
    given: frozenset[str]
    overrides: tuple[str, ...]


def read_line(command: str, schema: type[T], arguments: Sequence[str]) -> Line[T] | None:
    """Run Hydra over the arguments of `python -m distcache.<command>`, with `conf/<command>.yaml`
    over the tree `schema`; None where there is nothing to run (`--help`, `--cfg job`).

    Own lists may be typed without brackets, own texts as they are, and arguments without `key=`
    where `name_positional` knows their key. Raises ConfigError.
    """
    refuse_if(asks_for_sweep(arguments), "--multirun: only distcache.train has sweeps")
    typed = [_as_hydra(text, schema) for text in name_positional(arguments, schema)]
    _check_line(typed, schema)
    OmegaConf.register_new_resolver("own_keys", lambda: keys.usage(schema), replace=True)
    configs: list[DictConfig] = []
    before = sys.argv
    sys.argv = [command, *typed]
    try:
        _run_hydra(command, schema, configs.append)
    except SystemExit as stop:
        if stop.code:
            raise
    finally:
        sys.argv = before
    if not configs:
        return None
    try:
        values = OmegaConf.to_object(configs[0])
    except OmegaConfBaseException as error:
        raise value_error(error) from error
    read_units("", values)
    own, overrides = keys.own_keys(schema), get_args_parser().parse_args(typed).overrides
    theirs = [text for text in overrides if text.lstrip("+").partition("=")[0] not in own]
    given = {one.key_or_group for one in OverridesParser.create().parse_overrides(overrides)}
    return Line(values, frozenset(given), tuple(theirs))  # type: ignore[arg-type]


def run_command(
    name: str,
    schema: type[T],
    go: Callable[[Line[T], Sequence[str]], int],
    arguments: Sequence[str] | None = None,
    interrupted: str = "interrupted",
) -> int:
    """`python -m distcache.<name>`: what `go` makes of the line that was read and of the command as
    it was typed, an exit code. `interrupted`: what is said after a Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    take_over_ctrl_c()
    set_up_logging()
    logger = logging.getLogger(f"distcache.{name}")
    try:
        line = read_line(name, schema, given)
        return 0 if line is None else go(line, ["python", "-m", f"distcache.{name}", *given])
    except KeyboardInterrupt:
        logger.warning(interrupted)
        return INTERRUPTED
    except DistcacheError as error:
        logger.error("%s", error)
        return 1


def name_positional(arguments: Sequence[str], schema: type) -> list[str]:
    """Return the arguments with `key=` before each that has none.

    The name of an own key takes the argument after it as its value (`verify runs/x`). Any other
    word is a value of the positional key of `schema`. Raises ConfigError where there is none, and
    for several values of a key that is no list.
    """
    own_keys = keys.own_keys(schema)
    positional = next((f.name for f in fields(schema) if f.metadata.get("positional")), None)
    values: dict[str, list[str]] = {}
    words: list[str] = []
    pending = iter(get_args_parser().parse_args(list(arguments)).overrides)
    for word in pending:
        if "=" in word or word.startswith(("+", "~")):
            continue
        key = word if word in own_keys else positional
        value = next(pending, None) if word in own_keys else word
        if key is None or value is None:
            hint = f"give a value, {word}=..." if key else "give key=value; --help shows the keys"
            raise ConfigError(f"{word}: this is no key=value: {hint}")
        values.setdefault(key, []).append(value)
        words += [word] if value is word else [word, value]
    rest = list(arguments)
    for word in words:
        rest.remove(word)
    for key, texts in values.items():
        with_key = [text for text in rest if text.startswith(f"{key}=")]
        is_twice = len(texts) > 1 and key not in keys.list_keys(schema)
        refuse_if(is_twice or bool(with_key), f"{' '.join([*texts, *with_key])}: give one {key}")
    return [*rest, *(f"{key}={','.join(texts)}" for key, texts in values.items())]


def _as_hydra(text: str, schema: type) -> str:
    """An argument as Hydra's grammar has it: `key=a,b` of an own list with brackets, a text that
    cannot be read (a path with blanks) in quotes."""
    key, equals, value = text.partition("=")
    if not equals or key not in keys.own_keys(schema):
        return text
    if key in keys.list_keys(schema) and value and not value.startswith("["):
        text = f"{key}=[{value}]"
    try:
        OverridesParser.create().parse_overrides([text])
    except HydraException:
        return override(key, value)
    return text


def compose_overrides(overrides: Sequence[str]) -> str:
    """Compose without a command line; the config tree as YAML. Raises ConfigError."""
    _check_line(overrides)
    ConfigStore.instance().store(name="train_schema", node=Config)
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
            return to_text(hydra.compose("train", overrides=list(overrides)))
    except OmegaConfBaseException as error:
        raise value_error(error) from error
    except HydraException as error:
        raise hydra_error(error) from error


def value_error(error: OmegaConfBaseException) -> ConfigError:
    """Return the error for a key whose value OmegaConf cannot resolve or convert, in one line."""
    reason = str(error).partition("\n")[0]
    fix = "give a value of its type"
    if isinstance(error, InterpolationResolutionError):
        fix = (
            "write ${key} for a key that `--cfg job` shows, ${oc.env:NAME} for a variable that is "
            "set, or the value itself"
        )
    return ConfigError(f"{error.full_key or 'configuration'}: {reason}: {fix}")


def to_text(config: DictConfig) -> str:
    """A composed tree as YAML with all interpolations resolved.

    Raises ConfigError for keys outside the tree (`+key=value`) and for values that are missing.
    """
    if unknown := sorted(
        key for key in keys.keys_of(OmegaConf.to_container(config)) if not keys.is_known(key)
    ):
        raise keys.no_such_key(unknown)
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        refuse_if(missing, f"{', '.join(missing)}: a value is needed; give one or choose a group")
        return OmegaConf.to_yaml(config, resolve=True)
    except OmegaConfBaseException as error:
        raise value_error(error) from error


def to_config(text: str) -> Config:
    """The typed tree of a YAML text of `to_text`."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(text))
        config: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise value_error(error) from error
    except yaml.YAMLError as error:
        raise ConfigError(str(error)) from error
    return as_words(config)


def checked_config(text: str) -> Config:
    """The typed tree, every value checked; warnings are logged. Raises ConfigError."""
    config = to_config(text)
    for warning in check(config):
        log.warning(warning)
    return config


def asks_for_sweep(arguments: Sequence[str]) -> bool:
    """Whether Hydra would read a command line as a sweep."""
    given = get_args_parser().parse_args(list(arguments))
    return given.multirun or "hydra.mode=MULTIRUN" in given.overrides


def override(key: str, value: object) -> str:
    """A Hydra override whose value is taken as it is, whatever signs it holds."""
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{text}'"


def _run_sweep_job(config: DictConfig) -> int:
    """Run one job of a sweep in fresh processes; its exit code."""
    settings = HydraConfig.get()
    # The job itself checks its configuration: the parent never looks at a device.
    folder = Path(settings.runtime.output_dir)
    flags, ranks = _config_flags(sys.argv[1:]), int(config.run.sweep_ranks)
    arguments = [*flags, *settings.overrides.task, override("run.dir", folder)]
    code = run_job(train_command(ranks, arguments), ranks)
    if code:
        log.error("job %s of the sweep ended with exit code %d: %s", settings.job.num, code, folder)
    return code


def _config_flags(arguments: Sequence[str]) -> list[str]:
    """The flags of a command line that say where configuration lies."""
    given = get_args_parser().parse_args(list(arguments))
    values = {name: getattr(given, f"config_{name}") for name in ("path", "name", "dir")}
    return [f"--config-{name}={value}" for name, value in values.items() if value is not None]


def _check_line(arguments: Sequence[str], schema: type = Config) -> None:
    """ConfigError for overrides that cannot be read, of keys that are none, or with values of
    another type or groups that are not there; Hydra would offer to add such keys to the tree.

    What is no plain override of a key of the tree is Hydra's to judge, as is all that composes
    nothing; with a folder of the user's own, so is any key without a dot, which may be a group.
    """
    line = get_args_parser().parse_args(list(arguments))
    if line.help or line.hydra_help or line.shell_completion or line.info:
        return
    own_groups = bool(_config_flags(arguments))
    own_groups |= any(text.startswith("hydra.searchpath=") for text in line.overrides)
    for text in line.overrides:
        given = _parsed(text)
        key = given.key_or_group
        if not is_plain(given):
            continue
        if not (
            keys.is_known(key, schema) or groups_of(key, schema) or (own_groups and "." not in key)
        ):
            raise keys.no_such_key([key], schema)
        if not given.is_sweep_override():
            _check_given(given, own_groups, schema)


def _parsed(text: str) -> Override:
    """Return the override `text` as Hydra reads it. Raises ConfigError where it cannot."""
    try:
        (given,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        raise ConfigError(
            f"{text}: this is no key=value that can be read: quote a text that holds blanks, "
            "commas, brackets or equals signs for the shell and for Hydra, 'key=\"text\"'"
        ) from error
    return given


def is_plain(given: Override) -> bool:
    """Return True for `key=value` of the tree; False for what is added or removed, and Hydra's."""
    key = given.key_or_group
    is_of_hydra = "/" in key or key.partition(".")[0] == "hydra"
    return given.type == OverrideType.CHANGE and not given.package and not is_of_hydra


def _check_given(given: Override, own_groups: bool, schema: type) -> None:
    """Raise ConfigError for the value of a key, section or group that the tree does not take."""
    key, value = given.key_or_group, given.value()
    groups = groups_of(key, schema)
    if groups and isinstance(value, str | list):
        names = [value] if isinstance(value, str) else value
        for name in names:
            if not isinstance(name, str) or (name not in groups and not own_groups):
                raise keys.not_in_group(key, str(name), groups)
    elif keys.is_section(key, schema):
        if value is None or isinstance(value, bool | int | float):  # not keys below it
            raise keys.not_a_value(key, given.get_value_element_as_str(), schema)
    elif keys.is_known(key, schema):
        keys.check_value(key, value, schema)


def groups_of(key: str, schema: type) -> list[str]:
    """The names that `key=<name>` may take: the files of conf/<key>/, ascending; none where it is
    no group of the command whose tree is `schema`."""
    if not (keys.is_section(key, schema) or issubclass(schema, Config)):
        return []
    return sorted(file.stem for file in (conf_dir() / key).glob("*.yaml"))
