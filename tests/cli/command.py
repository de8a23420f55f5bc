"""Common code of the command tests. The first argument of a test is the path of the command."""
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

TENON = os.path.abspath(sys.argv.pop(1))


class CommandTest(unittest.TestCase):
    NAME = ()  # words before the arguments

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name, content=None):
        """A path in the folder of this test. Writes the file if there is content."""
        path = os.path.join(self.folder, name)
        if content is not None:
            with open(path, "wb") as f:
                f.write(content)
        return path

    def run_it(self, *args, code=0, env=None, **options):
        """Standard output and error of a run that must end with this code."""
        done = subprocess.run([TENON, *self.NAME, *args], capture_output=True, timeout=300,
                              env={**os.environ, **(env or {})}, **options)
        self.assertEqual(done.returncode, code, (args, done.stdout[-2000:], done.stderr[-2000:]))
        return done.stdout.decode(), done.stderr.decode()


def strict_json(text):
    """Parses JSON and rejects NaN."""
    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def safetensors(tensors):
    """The bytes of a safetensors file. `tensors`: name -> (dtype, shape, raw bytes)."""
    header, body = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body
