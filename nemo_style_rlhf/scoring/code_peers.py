"""The two interpreters that judge a response: ``python code_peers.py code|tests``. scoring/code_judge.py explains why.

One interpreter runs the response's code, the other the tests. They share a socket, on which values cross as JSON: plain data as
copies, everything else as the number of an object that stays in its process. The tests' end takes only values from the other end,
and asks it whether two values are equal only if both are objects of the code.

This file imports only the standard library, since it is run by its path.
"""

import ast
import builtins
import contextlib
import importlib
import json
import operator
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any, BinaryIO

MODULE = "answer"
"""``__name__`` of the code under test."""
LONGEST_MESSAGE = 1 << 24
SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "complex": (complex, repr, complex),
    "Fraction": (Fraction, str, Fraction),
    "Decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
}
MUTABLE = (list, dict, set, deque, bytearray)
OWN_MODULES = {name: name for name in ("math", "cmath", "collections", "itertools", "functools", "statistics", "numpy")}
OWN_MODULES["np"] = "numpy"
"""Modules that tests may use by these names without importing them. Tests get the real modules even if the code defines these
names."""


class SandboxPeer:
    """One end of the socket."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader, self._writer = reader, writer
        self._kept: dict[int, Any] = {}
        """Objects that the other end may name, by their number."""
        self._seen: dict[int, Any] = {}
        """Local proxies of the other end's objects, by their number."""
        self._bases: dict[int, Any] = {}
        """Plain data of the other end's objects, by their number. Kept, so that they cannot change between two comparisons."""
        self.functions: dict[str, Callable[..., Any]] = {}
        """Functions that the other end may call by name."""

    def ask(self, function: Any, *given: Any, **named: Any) -> Any:
        """Return the other end's answer, or raise its exception. Changes that it makes to lists, sets and dicts among ``given``
        are made here, too."""
        name = function if isinstance(function, str) else self.encode(function)
        self._send(["ask", name, [self.encode(value) for value in given], self.encode(named)])
        while (message := self._receive())[0] == "ask":
            self._answer(*message[1:])
        kind, value, rest = message
        if kind == "raised":
            error = self.decode(value)
            # A StopIteration out of map() would end the loop of a test, see PEP 479.
            wrong = issubclass(error, StopIteration) and function != "next"
            raise RuntimeError("the code raised StopIteration") if wrong else error(rest)
        for index, changed in rest:
            _replace(given[index], self.decode(changed))
        return self.decode(value)

    def base(self, remote: "Remote") -> Any:
        """The plain value (string, number, list, ...) of an object whose class is derived from a plain type; else the object."""
        number = object.__getattribute__(remote, "_number")
        if number not in self._bases:
            value = self.ask("base", remote)
            if isinstance(value, MUTABLE):
                return value
            self._bases[number] = value
        return self._bases[number]

    def serve(self) -> None:
        while True:
            self._answer(*self._receive()[1:])

    def _answer(self, name: Any, given: list[Any], named: Any) -> None:
        try:
            function = self.functions[name] if isinstance(name, str) else self._kept[name["yours"]]
            values = [self.decode(value) for value in given]
            result = self.encode(function(*values, **self.decode(named)), base=name == "base")
            pairs = [(index, value) for index, value in enumerate(values) if isinstance(value, MUTABLE)]
            after = [(index, self.encode(value)) for index, value in pairs]
            answer = ["value", result, [pair for pair in after if pair[1] != given[pair[0]]]]
        except BaseException as error:  # noqa: BLE001 the code's SystemExit fails one test, not all
            answer = ["raised", self.encode(type(error)), str(error)]
        self._send(answer)

    def _send(self, message: list[Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        self._writer.flush()

    def _receive(self) -> list[Any]:
        line = self._reader.readline(LONGEST_MESSAGE)
        if not line.endswith(b"\n"):
            raise EOFError("the other end has gone, or does not end its message")
        message = json.loads(line)
        assert isinstance(message, list)
        return message

    def encode(self, value: Any, *, base: bool = False) -> Any:
        """The JSON form of ``value``. With ``base``, an object whose class the code derived from a plain type crosses as plain
        data."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_number")}
        if kind.__module__ != MODULE or base:
            for name, sequence in SEQUENCES.items():
                if isinstance(value, sequence):
                    return {name: [self.encode(item) for item in sequence(value)]}
            if isinstance(value, dict):
                return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
            for name, (text, written, _) in TEXTS.items():
                if isinstance(value, text):
                    return {name: written(value)}
            for simple in (int, float, str):
                if isinstance(value, simple):
                    return simple(value)
            if hasattr(value, "dtype") and hasattr(value, "tolist"):
                flat = value.tolist()
                return {"array": [flat, str(value.dtype)]} if isinstance(flat, list) else self.encode(flat)
        if isinstance(value, type) and _is_builtin(value):
            return {"type": value.__name__}
        number = id(value)
        self._kept[number] = value
        if isinstance(value, type) and issubclass(value, Exception):
            known = next(parent for parent in value.__mro__ if _is_builtin(parent))
            return {"error": [number, value.__name__, known.__name__]}
        return {"object": number}

    def decode(self, wire: Any) -> Any:
        if isinstance(wire, list):
            raise ValueError("a list without its kind")
        if not isinstance(wire, dict):
            return wire
        ((kind, content),) = wire.items()
        if kind in SEQUENCES:
            return SEQUENCES[kind](self.decode(item) for item in content)
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind in TEXTS:
            return TEXTS[kind][2](content)
        if kind == "array":
            return importlib.import_module("numpy").array(*content)
        if kind == "yours":
            return self._kept[content]
        if kind == "type" and isinstance(found := getattr(builtins, content), type):
            return found
        if kind == "object":
            return self._seen.setdefault(content, Remote(self, content))
        if kind == "error":
            number, name, known = content
            parent = getattr(builtins, known)
            return self._seen.setdefault(number, type(name, (parent,), {}))
        raise ValueError(f"no value of kind {kind!r} is known")


class Remote:
    """Proxy of an object of the other end. The other end carries out every operation."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: SandboxPeer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return _peer_of(self).ask(self, *given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # libraries trust such attributes: __array_interface__ holds an address
            raise AttributeError(name)
        return _peer_of(self).ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _peer_of(self).ask("setattr", self, name, value)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and _peer_of(self).ask("isinstance", value, self) is True

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_number"))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return _peer_of(self).ask("eq", self, other) is True
        mine = _peer_of(self).base(self)
        return not isinstance(mine, Remote) and bool(mine == other)


def _peer_of(remote: Remote) -> SandboxPeer:
    peer: SandboxPeer = object.__getattribute__(remote, "_peer")
    return peer


def _is_builtin(kind: type) -> bool:
    return getattr(builtins, kind.__name__, None) is kind


def _replace(old: Any, new: Any) -> None:
    """Replace the content of the mutable ``old`` by the content of ``new``."""
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)


def _alone(function: str) -> Callable[..., Any]:
    def forward(self: Remote, *given: Any) -> Any:
        return _peer_of(self).ask(function, self, *given)

    return forward


def _with_another(name: str, *, reflected: bool = False) -> Callable[[Remote, Any], Any]:
    """The code's end computes operations between two of its objects. With a value of the test, the operation happens here."""
    function = getattr(operator, name)

    def forward(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return _peer_of(self).ask(name, *((other, self) if reflected else (self, other)))
        mine = _peer_of(self).base(self)
        if isinstance(mine, Remote):
            return NotImplemented
        return function(other, mine) if reflected else function(mine, other)

    return forward


ALONE = (
    "len",
    "iter",
    "next",
    "bool",
    "str",
    "repr",
    "int",
    "float",
    "abs",
    "round",
    "neg",
    "getitem",
    "setitem",
    "delitem",
)
ORDER = ("lt", "le", "gt", "ge")
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor")
for _name in ALONE:
    setattr(Remote, f"__{_name}__", _alone(_name))
for _name in ORDER + ARITHMETIC:
    setattr(Remote, f"__{_name.strip('_')}__", _with_another(_name))
for _name in ARITHMETIC:
    setattr(Remote, f"__r{_name.strip('_')}__", _with_another(_name, reflected=True))


# --- the code's end ---------------------------------------------------------------------------------------------------


def run_code(end: socket.socket) -> None:
    """Run the code that the other end sends, then answer its requests, without standard streams."""
    names: dict[str, Any] = {"__name__": MODULE}
    peer = SandboxPeer(end.makefile("rb"), end.makefile("wb"))
    functions = [getattr(builtins, name, None) or getattr(operator, name) for name in ALONE + ORDER + ARITHMETIC]
    peer.functions |= dict(zip(ALONE + ORDER + ARITHMETIC, functions, strict=True))
    peer.functions |= {"getattr": getattr, "setattr": setattr, "isinstance": isinstance, "eq": operator.eq}
    peer.functions |= {
        "base": lambda value: value,
        "load": lambda code: exec(compile(code, MODULE, "exec"), names),
        "names": lambda wanted: {name: names[name] for name in wanted if name in names},
    }
    peer.serve()


# --- the tests' end ---------------------------------------------------------------------------------------------------


def run_tests(end: socket.socket) -> None:
    """Read code and tests from standard input, and write the number of each test that passes to standard output."""
    given = json.load(sys.stdin)
    verdicts = os.dup(1)
    _silence()
    peer = SandboxPeer(end.makefile("rb"), end.makefile("wb"))
    peer.ask("load", given["code"])
    for number, test in enumerate(given["tests"]):
        with contextlib.suppress(BaseException):
            _run_test(peer, test)
            os.write(verdicts, b"%d\n" % number)


def _run_test(peer: SandboxPeer, test: str) -> None:
    tree = ast.parse(test, "test")
    nodes = list(ast.walk(tree))
    read = {node.id for node in nodes if isinstance(node, ast.Name)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    # A builtin's name in a test means the builtin, even if the code defines it, unless the test reads no other name, as in
    # `assert sum(10, 15) == 6`.
    own = {name for name in read if hasattr(builtins, name) or name in OWN_MODULES}
    wanted = read - bound - own or (read if len(read) == 1 else set())
    names: dict[str, Any] = {"__name__": "test"}
    names |= {name: importlib.import_module(OWN_MODULES[name]) for name in own - wanted if name in OWN_MODULES}
    theirs = peer.ask("names", sorted(wanted))
    names |= {name: theirs[name] for name in wanted if name in theirs}
    exec(compile(tree, "test", "exec"), names)


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)


def main() -> None:
    role, number = sys.argv[1:]
    sys.set_int_max_str_digits(0)
    end = socket.socket(fileno=os.dup(int(number)))
    if role == "code":
        _silence()
        run_code(end)
    else:
        os.close(int(number))
        run_tests(end)


if __name__ == "__main__":
    main()
