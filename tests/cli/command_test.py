#!/usr/bin/env python3
"""command_test.py TENON: common behaviour of all commands: outputs, full disks, memory,
messages.
"""
import json
import os
import pty
import re
import resource
import select
import signal
import struct
import subprocess
import time
import unittest

from command import TENON, CommandTest, safetensors

BENCH = ["bench", "--shots", "1", "--no-costs", "--rows", "16", "--cols", "64"]


def shown(raw):
    """The lines of a terminal after these bytes: \\r moves back, ESC [ K erases the rest of a
    line.
    """
    lines, line, at = [], "", 0
    for part in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+", raw):
        if part == "\r":
            at = 0
        elif part == "\x1b[K":
            line = line[:at]
        elif part == "\n":
            lines.append(line)
            line, at = "", 0
        else:
            line = line[:at] + part + line[at + len(part):]
            at += len(part)
    return lines + [line]


class Command(CommandTest):
    def on_a_terminal(self, *args):
        """The output of the command on a terminal, as text."""
        leader, follower = pty.openpty()
        with subprocess.Popen([TENON, *args], stdout=follower, stderr=follower) as process:
            os.close(follower)
            raw = b""
            while True:
                try:
                    part = os.read(leader, 65536)
                except OSError:
                    break
                if not part:
                    break
                raw += part
        os.close(leader)
        self.assertEqual(process.returncode, 0, raw[-2000:])
        return raw.decode().replace("\r\n", "\n")

    def test_rows_do_not_follow_the_bar(self):
        x = self.path("x.safetensors", safetensors(
            {f"t{i}": ("F32", [4, 8], bytes(128)) for i in range(30)}))
        for args, rows, row in (
                ((*BENCH, "relu"), 2, r"relu(\.bwd)? bf16 .*(jit|executor)"),
                ((*BENCH, "relu", "--json"), 2, r'\{"case":'),
                (("quantize", "--recipe", "mxfp8,current", x), 60, "  e4m3:"),
                (("quantize", "--recipe", "mxfp8,current", x, "--json"), 60, r'\{"file":')):
            raw = self.on_a_terminal(*args)
            self.assertIn("\x1b[K", raw)  # there was a bar
            lines = shown(raw)
            for line in lines:
                self.assertNotRegex(line, r"^\[[# ]{30}\]", (args, line))
            self.assertEqual(sum(bool(re.match(row, line)) for line in lines), rows, lines)

    def test_a_cpu_has_no_registers(self):
        out, _ = self.run_it(*BENCH, "relu")
        for word in ("regs", "local", "thr "):
            self.assertNotIn(word, out)
        saved = self.path("bench.json")
        self.run_it(*BENCH, "relu", "--save", saved)
        with open(saved) as f:
            case = json.load(f)["cases"][0]
        self.assertGreater(case["us"], 0)
        for key in ("registers", "local_bytes", "threads", "kernels"):
            self.assertNotIn(key, case)

    def test_peers_of_a_case(self):
        out, _ = self.run_it(*BENCH, "--json", "--filter", "gelu bf16", "srelu bf16")
        for line in map(json.loads, out.splitlines()):
            if line["case"].startswith("srelu") or "->" in line["case"] or "+" in line["case"]:
                self.assertEqual(line["peers"], {})
            for peer in line["peers"].values():  # none in a build without oneDNN
                self.assertLessEqual(peer["speedup_lo"], peer["speedup"])
                self.assertGreaterEqual(peer["speedup_hi"], peer["speedup"])
                self.assertGreater(peer["time_us"], 0)
                self.assertRegex(peer["version"], r"^\d+\.\d+\.\d+$")

    def test_shapes_that_are_too_large(self):
        for args in (["--rows", "99999999999"], ["--cols", "9223372036854775807"],
                     ["--shape", "99999999999x4096"]):
            for more in ([], ["--list"]):
                _, err = self.run_it("bench", "relu", *args, *more, code=2)
                self.assertIn(args[1].split("x")[0], err)
                self.assertIn("elements", err)
                self.assertNotIn("overlaps", err)

    def test_memory_that_is_not_there(self):
        def little():
            resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))

        if "asan" in TENON:
            self.skipTest("a sanitizer's shadow needs more")
        _, err = self.run_it("bench", "--rows", "4000000", "relu", code=1, preexec_fn=little)
        self.assertRegex(err, r"bench: there is no memory for the inputs, \d+ bytes; give fewer")
        _, err = self.run_it("run", "gelu", "--rows", "100000", "--cols", "2048", code=1,
                             preexec_fn=little)
        self.assertIn("there is no memory for x", err)
        # The float64 reference needs more memory than the plan.
        _, err = self.run_it("run", "gelu gelu", "--rows", "20000", "--cols", "1024", "--repeat",
                             "0", code=1, preexec_fn=little)
        self.assertNotIn("bad_alloc", err)
        self.assertRegex(err, "(too large for the memory|no memory for)")
        self.assertIn("--rows", err)

    def test_full_disks(self):
        x = self.path("x.safetensors", safetensors({"x": ("F32", [2, 8], bytes(64))}))
        run = ["run", "gelu", "--input", x, "--repeat", "0"]
        full = "No space left on device"
        for args, option in (([*run, "--output"], "run --output"),
                             (["plan", "gelu", "--cols", "8", "-o"], "plan -o"),
                             (["plan", "gelu", "--cols", "8", "--format", "html", "-o"],
                              "plan -o"),
                             (["quantize", "--recipe", "mxfp8", x, "--svg"], "quantize --svg"),
                             ([*BENCH, "relu", "--save"], "bench --save")):
            _, err = self.run_it(*args, "/dev/full", code=1)
            self.assertIn(f"{option} /dev/full could not be written: {full}; ", err)
        with open("/dev/full", "w") as device:
            for args in (["list"], ["--help"], ["doctor", "--json"], [*BENCH, "relu"],
                         ["plan", "gelu", "--cols", "8"], ["show", "gelu"], [*run, "--json"],
                         ["quantize", "--recipe", "all", x]):
                done = subprocess.run([TENON, *args], stdout=device, stderr=subprocess.PIPE,
                                      text=True, timeout=300)
                self.assertEqual(done.returncode, 1, (args, done.stderr))
                self.assertIn(f"the standard output could not be written: {full}", done.stderr)

    def test_a_failed_write_costs_no_old_file(self):
        def small():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

        x = self.path("x.safetensors", safetensors({"x": ("F32", [2, 8], bytes(64))}))
        old, link = self.path("old", b"an old good file"), self.path("link")
        os.chmod(old, 0o640)
        os.symlink("old", link)
        writers = (["run", "gelu", "--input", x, "--repeat", "0", "--output"],
                   ["plan", "gelu", "--cols", "8", "--format", "html", "-o"],
                   ["quantize", "--recipe", "mxfp8", x, "--svg"],
                   [*BENCH, "relu", "--save"])
        before = sorted(os.listdir(self.folder))
        for args in writers:
            _, err = self.run_it(*args, link, code=1, preexec_fn=small)
            self.assertIn("link could not be written: File too large", err)
            with open(old, "rb") as f:
                self.assertEqual(f.read(), b"an old good file", args)
            self.assertEqual(sorted(os.listdir(self.folder)), before)
        for args in writers:
            self.run_it(*args, link)
            self.assertTrue(os.path.islink(link))
            with open(old, "rb") as f:
                self.assertGreater(len(f.read()), 100)
            self.assertEqual(os.stat(old).st_mode & 0o777, 0o640)
            self.assertEqual(sorted(os.listdir(self.folder)), before)

    def test_no_output_is_the_input(self):
        data = safetensors({"x": ("F32", [2, 8], bytes(64))})
        x = self.path("x.safetensors", data)
        chain = self.path("chain.txt", b"gelu")
        for file, args, option in (
                (x, ["run", "gelu", "--input", x, "--repeat", "0", "--output"], "run --output"),
                (x, ["quantize", "--recipe", "mxfp8", x, "--svg"], "quantize --svg"),
                (chain, ["run", "@" + chain, "--cols", "8", "--repeat", "0", "--output"],
                 "run --output"),
                (chain, ["plan", "@" + chain, "--cols", "8", "-o"], "plan -o")):
            link, hard = self.path("link"), self.path("hard")
            os.symlink(file, link)
            os.link(file, hard)
            with open(file, "rb") as f:
                before = f.read()
            roundabout = os.path.join(self.folder, ".", os.path.basename(file))
            for output in (file, roundabout, os.path.relpath(file), link, hard):
                out, err = self.run_it(*args, output, code=2)
                self.assertEqual(out, "")
                self.assertIn(f"{option} {output} is the input file {file}", err)
                with open(file, "rb") as f:
                    self.assertEqual(f.read(), before)
            os.remove(link)
            os.remove(hard)
            self.run_it(*args, self.path("other"))

    def test_a_file_that_shrinks(self):
        """The line of the first tensor shows that the second one is being read."""
        rows = 1 << 12
        x = self.path("x.safetensors", safetensors({"a": ("F32", [1, 8], bytes(32)),
                                                    "b": ("F32", [rows, 4096], b"")}))
        with open(x, "rb") as f:
            head = f.read()
        end = 32 + rows * 4096 * 4
        text = head[8:].split(b"}}")[0].rsplit(b"[", 1)[0] + b"[32, %d]}}" % end
        with open(x, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + end)
        leader, follower = pty.openpty()
        args = [TENON, "quantize", "--recipe", "all", x, "--json"]
        with subprocess.Popen(args, stdout=follower, stderr=subprocess.PIPE, text=True) as process:
            self.assertTrue(select.select([leader], [], [], 100)[0])
            os.read(leader, 100)
            os.truncate(x, 8 + len(text) + 4096)
            os.close(follower)
            deadline = time.monotonic() + 100
            while process.poll() is None and time.monotonic() < deadline:
                if select.select([leader], [], [], 0.1)[0]:
                    try:
                        os.read(leader, 65536)
                    except OSError:
                        break
            err = process.stderr.read()
        os.close(leader)
        self.assertEqual(process.returncode, 1, err)
        self.assertIn("x.safetensors shrank while it was read", err)

    def test_limits_of_the_cache(self):
        def cache_list(value):
            env = dict(os.environ, TENON_CACHE_MB=value, TENON_CACHE_DIR=self.path("cache"))
            return self.run_it("cache", "list", env=env)[0]

        self.assertNotIn("off:", cache_list("0.5"))
        self.assertNotIn("off:", cache_list(""))
        self.assertIn("off: TENON_CACHE_MB is 0\n", cache_list("0"))
        self.assertIn("TENON_CACHE_MB is '1e-9', less than a byte; give megabytes",
                      cache_list("1e-9"))
        for value in ("much", "-1", "nan", "1e10", "12 MB"):
            self.assertIn(f"TENON_CACHE_MB is '{value}'; it must be from 0 to 1e9 megabytes",
                          cache_list(value))

    def test_suggestions_for_ops(self):
        for text, name in (("linea(8,8)", "linear"), ("layernrom", "layernorm"),
                           ("gellu", "gelu"), ("bia", "bias"), ("swigl", "swiglu"),
                           ("make_extra_ouput", "make_extra_output")):
            for command in ("plan", "run"):
                _, err = self.run_it(command, text, "--cols", "8", code=2)
                self.assertIn(f"no op of this name (did you mean '{name}'?); ", err)
        for text in ("nothing_like_it", "g" * 60000):
            _, err = self.run_it("plan", text, "--cols", "8", code=2)
            self.assertNotIn("did you mean", err)

    def test_columns_are_asked_for_by_their_option(self):
        for command in ("plan", "run"):
            _, err = self.run_it(command, "gelu", code=2)
            self.assertIn("give the columns, `--cols`", err)


if __name__ == "__main__":
    unittest.main()
