"""Reads a `Config`: defaults, then YAML files in order, then `key=value` from the command line.

Flags of the official program are accepted too (config_official), with its way of writing booleans (true/1/yes/on).
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sage_ray.config import Config, ConfigError, dotted_keys, type_words
from sage_ray.config_official import ALIASES, BARE, CONVERTED, FALSE, KNOWN, REFUSED, SEVERAL, SWITCHES, TRUE, switched


class Setting(NamedTuple):
    """One assignment: our dotted key, its value, and where it was written."""

    key: str
    value: Any
    source: str


def load_config(files: Sequence[Path], overrides: Sequence[str]) -> Config:
    """Merges defaults, YAML files and command line; later wins. Rules are checked by `config_check.validate`.

    Args:
        files: YAML files in order of precedence, the last wins.
        overrides: "key=value", "--key=value", "--key value" (two words) or a bare "--flag" for a boolean.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or malformed override.
    """
    merged = OmegaConf.structured(Config)
    settings = [setting for file in files for setting in _from_file(Path(file))]
    settings += _from_command_line(overrides)
    for setting in settings:
        if setting.key not in SWITCHES:
            _assign(merged, setting)
    for setting in _switched(settings, merged.data.gradient_accumulation_steps):
        _assign(merged, setting)
    try:
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}") from error


def open_output(config: Config) -> Path:
    """The run's folder, made when missing, with the resolved configuration in it. Raises: ConfigError."""
    output = Path(config.output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / "config.yaml").write_text(to_yaml(config), "utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir={config.output_dir!r}: cannot be written: {error}") from error
    return output


def to_yaml(config: Config) -> str:
    """The complete resolved configuration; `load_config` of this text gives an equal Config."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def _switched(settings: Sequence[Setting], rollouts_per_step: int) -> Iterator[Setting]:
    """What the official switches, which are read together, mean; a later plain setting of the same key wins."""
    places = {setting.key: i for i, setting in enumerate(settings)}
    given = {name: settings[places[name]] for name in SWITCHES if name in places}
    try:
        meant = switched({name: setting.value for name, setting in given.items()}, rollouts_per_step)
    except ValueError as error:
        name, value, rule = error.args
        raise ConfigError(f"{name}={value!r} {given[name].source}: {rule}") from None
    last = max((places[name] for name in given), default=-1)
    for key, value in meant.items():
        if places.get(key, -1) < last:
            yield Setting(key, value, settings[last].source)


def _from_file(file: Path) -> Iterator[Setting]:
    """Leaf assignments of one YAML file."""
    try:
        content = OmegaConf.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{file}: the configuration file does not exist") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{file}: must hold keys and values, holds a list")
    yield from _flatten(OmegaConf.to_container(content, resolve=False), "", f"in {file}")


def _flatten(node: Any, prefix: str, source: str) -> Iterator[Setting]:
    """Descends nested sections down to known keys; what is unknown keeps its full path for the message."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        is_leaf = key in dotted_keys() or key in KNOWN
        if isinstance(value, dict) and not is_leaf and (value or _is_section(key)):
            yield from _flatten(value, f"{key}.", source)
        else:
            yield from _resolve(key, value, source)


def _from_command_line(overrides: Sequence[str]) -> Iterator[Setting]:
    """Assignments of the command line; values are YAML, but text for keys that hold text."""
    source = "on the command line"
    for name, text in _split(overrides):
        for setting in _resolve(name, text, source):
            ours = setting.key in dotted_keys() and name not in CONVERTED
            yield setting._replace(value=_parse(setting.key, text)) if ours else setting


def _split(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(key, text) of each override, also in the official form of two words or of a bare flag."""
    words = list(overrides)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not equals and word.startswith("--"):
            keys = ALIASES.get(name, (name,))
            is_flag = name in BARE or any(dotted_keys()[key] is bool for key in keys if key in dotted_keys())
            takes_next = words and not words[0].startswith("--")
            if takes_next and (not is_flag or words[0].lower() in TRUE + FALSE):
                equals, text = "=", words.pop(0)
                while name in SEVERAL and words and not words[0].startswith("--") and "=" not in words[0]:
                    text += " " + words.pop(0)
            elif is_flag:
                equals, text = "=", "true"
        if not equals or not name.strip() or name != name.strip():
            raise ConfigError(f"{word!r} on the command line: must have the form key=value, without blanks around =")
        yield name, text


def _parse(key: str, text: str) -> Any:
    if dotted_keys()[key] is str:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _wrong_type(Setting(key, text, "on the command line")) from error


def _resolve(name: str, value: Any, source: str) -> Iterator[Setting]:
    """Our settings for a dotted key or an official flag (a switch keeps its name); ConfigError for an unknown key, a
    refused flag or value, or a section without keys."""
    if name in dotted_keys():
        yield Setting(name, value, source)
    elif name in CONVERTED:
        try:
            yield from (Setting(key, ours, source) for key, ours in CONVERTED[name](value).items())
        except ValueError as error:
            raise ConfigError(f"{name}={value!r} {source}: {error}") from None
    elif name in KNOWN - set(REFUSED):
        if name in SWITCHES:
            yield Setting(name, value, source)
        yield from (Setting(key, value, source) for key in ALIASES.get(name, ()))
    elif name in REFUSED:
        raise ConfigError(f"{name}={value!r} {source}: is not taken: {REFUSED[name]}")
    elif _is_section(name):
        inside = ", ".join(key for key in dotted_keys() if key.startswith(name + "."))
        raise ConfigError(f"{name}={value!r} {source}: {name} is a section, set a key inside it: {inside}")
    else:
        raise ConfigError(f"unknown key {name!r} {source}; the closest known key is {_closest(name)!r}")


def _is_section(name: str) -> bool:
    return any(key.startswith(name + ".") for key in dotted_keys())


def _closest(name: str) -> str:
    """The known key most like `name`, compared with whole dotted keys, their last part and official flags."""
    spellings = {key.rpartition(".")[2]: key for key in reversed(dotted_keys())}
    spellings |= {flag: keys[0] for flag, keys in ALIASES.items()}
    spellings |= {key: key for key in dotted_keys()}
    best = difflib.get_close_matches(name, spellings, n=1, cutoff=0.0)
    return spellings[best[0]]


def _assign(merged: DictConfig, setting: Setting) -> None:
    """Puts one value into the structured config, which converts it to the declared type or refuses."""
    kind, value = dotted_keys()[setting.key], setting.value
    interpolated = isinstance(value, str) and "${" in value
    if kind is bool and not interpolated:
        word = str(value).lower()
        if word not in TRUE + FALSE:
            raise _wrong_type(setting)
        value = word in TRUE
    is_texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind == list[str] and not is_texts and not interpolated:
        raise _wrong_type(setting)
    try:
        OmegaConf.update(merged, setting.key, value)
    except (OmegaConfBaseException, OverflowError) as error:
        if typing.get_origin(kind) is dict and isinstance(value, dict):
            raise ConfigError(f"{setting.key}={value!r} {setting.source}: {_first_line(error)}") from error
        raise _wrong_type(setting) from error


def _wrong_type(setting: Setting) -> ConfigError:
    expected = type_words(dotted_keys()[setting.key])
    if expected == "list of str":
        expected += ", as in [first, second]"
    return ConfigError(f"{setting.key}={setting.value!r} {setting.source}: must be of type {expected}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
