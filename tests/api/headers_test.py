#!/usr/bin/env python3
"""headers_test.py CXX INCLUDE: compiles each public header alone. Before C++20 there is one
error.
"""
import os
import subprocess
import sys
import unittest

CXX, INCLUDE = sys.argv.pop(1), sys.argv.pop(1)
HEADERS = sorted(os.listdir(os.path.join(INCLUDE, "tenon")))


def compiled(header, standard, language="c++"):
    return subprocess.run(
        [CXX, f"-std={standard}", "-x", language, "-fsyntax-only", "-I", INCLUDE, "-"],
        input=f'#include "tenon/{header}"\n', capture_output=True, text=True, timeout=100)


class Headers(unittest.TestCase):
    def test_cxx20(self):
        for header in HEADERS:
            done = compiled(header, "c++20")
            self.assertEqual(done.returncode, 0, (header, done.stderr))

    def test_before_cxx20_there_is_one_error(self):
        for header in HEADERS:
            if header == "tenon.h":
                continue
            for standard in ("c++11", "c++17"):
                done = compiled(header, standard)
                self.assertNotEqual(done.returncode, 0, header)
                errors = [line for line in done.stderr.splitlines() if "error:" in line]
                self.assertEqual(len(errors), 1, (header, standard, errors[:4]))
                self.assertIn("Tenon's C++ headers need C++20: compile with -std=c++20", errors[0])

    def test_the_c_header_needs_no_cxx20(self):
        for standard, language in (("c99", "c"), ("c++11", "c++"), ("c++17", "c++")):
            done = compiled("tenon.h", standard, language)
            self.assertEqual(done.returncode, 0, (standard, done.stderr))


if __name__ == "__main__":
    unittest.main()
