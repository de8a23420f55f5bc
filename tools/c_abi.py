#!/usr/bin/env python3
"""Writes python/tenon/_c_abi.py, the C ABI for ctypes, from include/tenon/tenon.h.

It parses only the C subset of that header: enums with explicit values, structs, function typedefs,
and functions marked TENON_API. Everything else is an error.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "include" / "tenon" / "tenon.h"
MODULE = ROOT / "python" / "tenon" / "_c_abi.py"

NUMBERS = {
    "double": "c_double",
    "float": "c_float",
    "int": "c_int",
    "int32_t": "c_int32",
    "int64_t": "c_int64",
    "size_t": "c_size_t",
    "uint64_t": "c_uint64",
}
POINTERS = {"void*": "c_void_p", "const char*": "c_char_p", "char*": "POINTER(c_char)"}
FUNCTION = re.compile(r"(?P<result>.+?)\(\*(?P<name>\w+)\)\((?P<arguments>.*)\)")


def camel(name):
    return "".join(word.capitalize() for word in name.removeprefix("tenon_").split("_"))


class Header:
    """The declarations as lines of Python."""

    def __init__(self, text):
        self.opaque, self.known, self.functions = set(), set(), {}
        self.lines = []
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
        text = re.sub(r"#ifdef __cplusplus\n.*?#endif", "", text, flags=re.DOTALL)
        text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
        for declaration in re.findall(r"((?:[^;{}]|\{[^}]*\})+);", " ".join(text.split())):
            self.declare(declaration.strip())

    def declare(self, c):
        if m := re.fullmatch(r"enum tenon_(\w+) \{(.*)\}", c):
            self.enum(*m.groups())
        elif m := re.fullmatch(r"typedef struct (\w+) \{(.*)\} \1", c):
            self.struct(*m.groups())
        elif m := re.fullmatch(r"typedef struct (\w+) \1", c):
            self.opaque.add(m[1])
        elif m := re.fullmatch(r"typedef (.*)", c):
            name, kind = self.variable(m[1])
            self.lines += ["", f"{camel(name)} = {kind}"]
            self.known.add(name)
        elif m := re.fullmatch(r"TENON_API (.+?)(\w+)\((.*)\)", c):
            kinds = [self.kind(m[1]), *self.arguments(m[3])]
            self.functions[m[2]] = kinds
        else:
            raise ValueError(f"tenon.h: what is this? {c}")

    def enum(self, name, body):
        self.lines += ["", f"{name.upper()} = {{"]
        for entry in body.split(","):
            key, number = re.fullmatch(r"\s*TENON_(\w+) = (\d+)\s*", entry).groups()
            key = key.lower().removeprefix(name + "_")
            self.lines.append(f'    "{key}": {number},')
        self.lines.append("}")

    def struct(self, name, body):
        fields = [f for line in body.split(";") if line.strip() for f in self.fields(line.strip())]
        sized = fields[0] == ("size", "c_size_t")
        self.lines += ["", "", f"class {camel(name)}({'Sized' if sized else 'Structure'}):"]
        self.lines.append("    _fields_ = (")
        self.lines += [f'        ("{n}", {kind}),' for n, kind in fields[sized:]]
        self.lines += ["    )", ""]
        self.known.add(name)

    def fields(self, line):
        """Splits `int32_t a, b[2]` into two declarations."""
        if FUNCTION.fullmatch(line):
            return [self.variable(line)]
        first, *more = line.split(",")
        type_of = re.fullmatch(r"(.+?)\w+(\[\d+\])?", first)[1]
        return [self.variable(v) for v in (first, *(type_of + v.strip() for v in more))]

    def variable(self, c):
        """The name and kind of `int32_t a`, `int64_t a[2]` or `int (*a)(void* user)`."""
        if m := FUNCTION.fullmatch(c):
            kinds = [self.kind(m["result"]), *self.arguments(m["arguments"])]
            return m["name"], f"CFUNCTYPE({', '.join(kinds)})"
        type_of, name, count = re.fullmatch(r"(.+?)(\w+)(?:\[(\d+)\])?", c).groups()
        return name, self.kind(type_of) + (f" * {count}" if count else "")

    def arguments(self, c):
        """The kinds of an argument list. An array argument is a pointer."""
        for argument in () if c == "void" else c.split(","):
            type_of, array = re.fullmatch(r"\s*(.+?)\w+(\[\d+\])?", argument).groups()
            yield self.kind(type_of.strip() + ("*" if array else ""))

    def kind(self, c):
        """The ctypes name of a C type."""
        c = c.strip()
        bare = c.removeprefix("const ")
        if c in POINTERS or bare in NUMBERS:
            return POINTERS.get(c) or NUMBERS[bare]
        if c == "void":
            return "None"
        if bare in self.known:
            return camel(bare)
        target = re.fullmatch(r"(.+?)( const)?\*", c)
        if target is None:
            raise ValueError(f"tenon.h: the type {c} is not known; declare it before its first use")
        inner = target[1].removeprefix("const ").removesuffix(" const")
        if inner in self.opaque:
            return "c_void_p"
        return f"POINTER({self.kind(target[1])})"


TOP = '''"""The C ABI for ctypes. Made from include/tenon/tenon.h by tools/c_abi.py; do not edit."""

# ruff: noqa: E501
# fmt: off
from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
    sizeof,
)
from typing import Any, ClassVar


class Sized(Structure):
    """Structs whose first field is their size."""

    _fields_: ClassVar[Any] = (("size", c_size_t),)

    def __init__(self, **fields: object) -> None:
        super().__init__(size=sizeof(self), **fields)

'''


def module(header):
    """The text of the Python module for the text of a header."""
    found = Header(header)
    lines = ["", "# Of each function: its result, then its arguments.", "SIGNATURES: Any = {"]
    for name, kinds in found.functions.items():
        lines.append(f'    "{name}": ({", ".join(kinds)}{"," if len(kinds) == 1 else ""}),')
    text = TOP + "\n".join([*found.lines, *lines, "}"]) + "\n"
    return re.sub(r"\n{4,}", "\n\n\n", text)


if __name__ == "__main__":
    MODULE.write_text(module(HEADER.read_text()))
