"""Tests that the generated ctypes module matches the header and its struct layout."""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
from tenon import _c_abi

ROOT = Path(__file__).resolve().parents[2]


def load_tool():
    spec = importlib.util.spec_from_file_location("c_abi_tool", ROOT / "tools" / "c_abi.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()
HEADER = tool.HEADER.read_text()


def test_the_module_is_made_from_the_header():
    made = Path(_c_abi.__file__).read_text()
    assert made == tool.module(HEADER), "tenon.h has changed: run tools/c_abi.py"


def test_a_change_of_the_header_is_seen():
    for old, new in (
        ("int64_t rows, cols, stride;", "int64_t rows, stride, cols;"),
        ("TENON_BF16 = 2", "TENON_BF16 = 3"),
        ("int tenon_set_threads(int32_t count)", "int tenon_set_threads(int64_t count)"),
    ):
        assert old in HEADER
        assert tool.module(HEADER.replace(old, new)) != tool.module(HEADER)


@pytest.mark.parametrize(
    "declaration",
    ["short tenon_x;", "TENON_API int tenon_x(tenon_unknown* x);", "typedef union u { int a; } u;"],
)
def test_what_the_tool_does_not_know_is_an_error(declaration):
    with pytest.raises(ValueError, match="tenon.h: "):
        tool.module(declaration)


def structs():
    """The C names of the structs with their classes."""
    names = tool.re.findall(r"typedef struct (\w+) \{", HEADER)
    return {name: getattr(_c_abi, tool.camel(name)) for name in names}


def test_layout_is_the_compilers(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    lines, expected = [], []
    for name, struct in structs().items():
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        expected.append(ctypes.sizeof(struct))
        fields = [f for base in reversed(struct.__mro__) for f in vars(base).get("_fields_", ())]
        for field, *_ in fields:
            of = getattr(struct, field)
            lines.append(f'printf("%zu\\n", offsetof({name}, {field}));')
            lines.append(f'printf("%zu\\n", sizeof((({name}*)0)->{field}));')
            expected += [of.offset, of.size]
    for enum in tool.re.findall(r"^enum tenon_(\w+) \{", HEADER, tool.re.MULTILINE):
        expected += getattr(_c_abi, enum.upper()).values()
    for name in tool.re.findall(r"\b(TENON_\w+) = \d", HEADER):
        lines.append(f'printf("%d\\n", {name});')
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(
        '#include <stdio.h>\n#include "tenon/tenon.h"\nint main(void) {'
        + "\n".join(lines)
        + "return 0;}"
    )
    subprocess.run([compiler, "-I", ROOT / "include", source, "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert [int(n) for n in printed.split()] == expected
    assert len(structs()) > 15
