"""A dataclass, config files and --key=value → one typed config.

    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False

Each option is declared once, as a field of a dataclass with its type, default and comment; `--help` prints just
that. A config file is plain Python that assigns options; it runs like any script the user starts. Names that begin
with an underscore, modules, functions and classes in it are its own affair. Flags win over files, later over earlier.
"""

import atexit
import contextlib
import dataclasses
import difflib
import errno
import functools
import inspect
import os
import re
import runpy
import sys
import types
import typing
from numbers import Number


class UserError(Exception):
    """A mistake the user can mend. The text names the file or flag, what was found and what to do."""


def command(main):
    """Decorate a script's main(argv): a UserError becomes one message on stderr and exit code 2, Ctrl-C 130.

    Output that nobody reads any more (`| head`) ends it with 141, as SIGPIPE would; output to a full disk with 1.
    """

    def told(error):
        if os.environ.get("LOCAL_RANK", "0") == "0":  # under torchrun one voice a machine is enough
            print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)

    @functools.wraps(main)
    def run(argv=None):
        for stream in (sys.stdout, sys.stderr):  # LC_ALL=C must not make printing a model's text an error
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(encoding="utf-8", errors="replace")
        try:
            try:
                return main(sys.argv[1:] if argv is None else argv)
            finally:
                sys.stdout.flush()  # here, where an error can still be told
        except UserError as error:
            told(error)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own last flush fails again
            if error.errno == errno.ENOSPC:
                told(f"output can't be written: {error.strerror}")
            raise SystemExit(1 if error.errno == errno.ENOSPC else 141) from None

    is_rank = main.__module__ == "__main__" and "LOCAL_RANK" in os.environ
    return _without_finalization(run) if is_rank else run


def _without_finalization(main):
    """End the process after main as Python does, but for the finalization of the interpreter.

    The threads of a gloo process group outlive it once there was a DistributedDataParallel, and one that frees the
    last collective's tensor while Python finalizes aborts the process: one rank of a finished run in ten (torch 2.13,
    https://github.com/pytorch/pytorch/issues/190489).
    """

    def run():
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        atexit._run_exitfuncs()  # as multiprocessing ends its processes
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)

    return run


def parse(cls, argv):
    """Config files and flags → a checked `cls`. Raises UserError."""
    return build(cls, read(cls, argv))


def read(cls, argv):
    """What argv and its config files say → {option: value of the declared type}. Raises UserError; --help exits 0."""
    if "--help" in argv or "-h" in argv:
        print(help_text(cls))
        raise SystemExit(0)
    said = {}
    for path in (arg for arg in argv if not arg.startswith("-")):
        for name, value in _run_file(path).items():
            said[name] = _typed(cls, name, value, where=path)
    for arg in (arg for arg in argv if arg.startswith("-")):
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or not equals:
            raise UserError(f"{arg}: options are written --name=value; --help lists them")
        said[name] = _typed(cls, name, value, where=f"--{name}")
    return said


def build(cls, said):
    """{option: value} over the defaults → a checked `cls`. Raises UserError for a value that can't work."""
    config = cls(**said)
    try:
        config.check()
    except ValueError as error:
        raise UserError(str(error)) from None
    return config


def known(cls, values):
    """The entries of a saved config that are options of `cls`, typed; the rest, from another version, is dropped."""
    names = typing.get_type_hints(cls)
    return {name: _typed(cls, name, value, where="saved config") for name, value in values.items() if name in names}


def help_text(cls):
    """Every option with type, default and comment, grouped by the class that declares it, the most specific first."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    kinds, lines = typing.get_type_hints(cls), []
    for owner in (c for c in cls.__mro__ if dataclasses.is_dataclass(c)):
        lines += ["", f"{owner.__name__}:"]
        for name, comment in _comments(owner).items():
            if name in defaults:  # not yet listed, by a class that declares it anew
                lines.append(f"  {f'--{name}={defaults.pop(name)!r}':<36} {_type_name(kinds[name]):<10} {comment}")
    usage = f"usage: python {os.path.basename(sys.argv[0])} [config/file.py ...] [--option=value ...]"
    return "\n".join([usage, *lines])


def _comments(cls):
    """{field: the comment behind it in the source of `cls`}."""
    return dict(re.findall(r"^    (\w+): [^#\n]*(?:# *(.*))?$", inspect.getsource(cls), re.MULTILINE))


def _type_name(kind):
    if typing.get_args(kind):
        return "|".join(_type_name(part) for part in typing.get_args(kind))
    return getattr(kind, "__name__", str(kind))


def _run_file(path):
    if not os.path.isfile(path):
        hint = f"; did you mean --{path}?" if "=" in path else "; an argument without -- names a config file"
        raise UserError(f"{path}: no such config file{hint}")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:  # whatever the user's own file raises is told as its mistake, not as ours
        raise UserError(f"{path}: {type(error).__name__}: {error}") from None
    own = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    return {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, own)}


def _typed(cls, name, value, where):
    """`value`, text from a flag or a Python value from a file, as the type that `cls` declares for `name`."""
    kinds = typing.get_type_hints(cls)
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "--help lists them all"
        raise UserError(f"{where}: unknown option '{name}'; {hint}")
    if isinstance(value, str | Number | os.PathLike):
        for kind in _alternatives(kinds[name]):
            try:
                return _convert(str(value), kind)
            except ValueError:
                continue
    raise UserError(f"{where}: {name} must be {_type_name(kinds[name])}, not {value!r}")


def _alternatives(kind):
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _convert(text, kind):
    if typing.get_origin(kind) is typing.Literal:
        choices = {str(choice): choice for choice in typing.get_args(kind)}
        if text not in choices:
            raise ValueError(text)
        return choices[text]
    if kind is bool:
        if text.lower() not in ("true", "1", "yes", "on", "false", "0", "no", "off"):
            raise ValueError(text)
        return text.lower() in ("true", "1", "yes", "on")
    if kind is int:
        try:
            return int(text)
        except ValueError:
            number = float(text)  # 1e4 is a fair way to write an integer, 2.5 is not
            if not number.is_integer():
                raise ValueError(text) from None
            return int(number)
    return kind(text)
